"""What the gateway counts, of all its processes together, as Prometheus metrics."""
