"""The daemon: settings, data plane, control plane, metrics, status, command line."""
