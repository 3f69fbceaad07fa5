"""What is on disk: the format of a cache, and the code that reads and writes it.

``format`` and ``packed_format`` define the records, ``index`` says which samples there are, ``read`` loads them,
``write`` makes a cache, ``verify`` checks one and ``convert`` changes its form. Nothing here knows models or decoders.
"""
