"""Latentry at the module paths that NeMo AutoModel documents for its tools; see ``compat/nemo_automodel``."""
