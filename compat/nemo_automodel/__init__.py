"""Latentry at the import paths that NeMo AutoModel documents for its diffusion data tools.

Only an editable install puts these thin modules on the path, behind whatever is installed: where
NeMo AutoModel itself is present, it is found first.
"""
