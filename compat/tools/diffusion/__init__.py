"""See ``tools``."""
