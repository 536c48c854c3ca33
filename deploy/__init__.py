"""Puts replicas and a trainer on HF Jobs, Slurm, Kubernetes and compose."""
