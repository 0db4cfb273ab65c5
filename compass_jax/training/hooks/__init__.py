"""What a run does beside its steps: one hook a file."""
