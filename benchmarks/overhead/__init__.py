"""What a proxy costs between a load generator and fixed-answer upstreams, beside its peers."""
