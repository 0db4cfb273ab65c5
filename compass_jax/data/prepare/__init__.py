"""Which rows of conversations are worth learning from: filters, duplicates, contamination."""
