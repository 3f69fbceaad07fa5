"""See ``nemo_automodel``."""
