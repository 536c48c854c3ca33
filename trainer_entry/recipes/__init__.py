"""Trainer scripts that run unmodified TRL behind rollmux."""
