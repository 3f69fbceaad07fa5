"""Where images, videos and captions come from. A file is named by its path in the source, so a source can be moved."""
