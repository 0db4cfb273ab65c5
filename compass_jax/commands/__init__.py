"""The commands of `compass`, one file each, and the code that they share."""
