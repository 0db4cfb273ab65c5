"""Tasks and environments of this package. The core reaches them by their import path only."""
