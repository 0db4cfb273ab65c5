"""A run: its directory, its logs, its screen."""
