"""Will put replicas and a trainer on HF Jobs, Slurm, Kubernetes and compose. Empty so far."""
