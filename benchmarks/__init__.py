"""Simulated vLLM replica, demo, trace replay and measurements."""
