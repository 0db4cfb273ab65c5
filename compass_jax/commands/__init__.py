"""What `compass` does: a file for each command, and what they share."""
