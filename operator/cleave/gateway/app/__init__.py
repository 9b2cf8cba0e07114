"""The client side of the gateway: connections, TLS handshakes and request handlers."""
