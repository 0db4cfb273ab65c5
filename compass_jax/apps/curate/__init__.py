"""Selection of training data (filters, duplicates, a teacher's answers) and merging of models."""
