"""Selection of training data before a run: filters, duplicates, a teacher's answers."""
