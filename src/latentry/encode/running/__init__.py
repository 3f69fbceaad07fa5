"""Running tasks: decode, encode and write, overlapped."""
