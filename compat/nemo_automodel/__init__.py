"""Latentry at the import paths that NeMo AutoModel documents for its diffusion data tools.

Only an editable install puts these thin modules on the path, after the installed packages: if NeMo AutoModel itself
is installed, Python finds it first.
"""
