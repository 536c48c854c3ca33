"""A training run on Hugging Face Jobs: replicas, bucket and trainer, all under one label."""
