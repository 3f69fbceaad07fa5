"""Videos: which frames a file has, which of them make up a sample, and their pixels."""
