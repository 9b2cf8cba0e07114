"""The client side of a gateway: connections, TLS handshakes, and handlers of its paths."""
