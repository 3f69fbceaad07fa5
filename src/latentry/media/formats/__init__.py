"""Image formats: what a file is, what its header says, and its pixels.

Each module knows one format. ``latentry.media.images`` chooses among them by the content of a file.
"""
