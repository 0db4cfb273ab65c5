"""A run while it goes on and afterwards: its directory, its log, its screen."""
