"""What clients meet: connections, TLS, and the gateway's own pages."""
