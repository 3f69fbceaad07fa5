"""What is on disk: metadata, the index over it, and the cache files themselves.

``metadata`` reads what a tool wrote about the samples, ``index`` turns it into columns that fit in
memory by the hundred million, ``files`` opens one sample. Nothing here knows of models or pixels.
"""
