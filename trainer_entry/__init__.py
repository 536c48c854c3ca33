"""Starts, watches and stops the daemon and the trainer."""
