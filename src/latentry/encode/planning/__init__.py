"""Planning: what happens to every input, before any pixel is decoded."""
