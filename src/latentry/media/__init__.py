"""Pixels: reading a picture's size from its header, decoding it as it should look, cutting it to shape."""
