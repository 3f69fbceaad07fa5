"""Reading a cache: whole samples, or batches by field."""
