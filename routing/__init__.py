"""Which replica gets a rollout: block hashes, prefix table, policies and their registry. Pure."""
