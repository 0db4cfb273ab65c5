"""The directory, the logs and the screen output of a run."""
