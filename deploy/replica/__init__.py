"""What runs inside a replica's own process. Each file stands alone, with what vLLM's image has."""
