"""Contracts and clients between components: gRPC stubs, agent discovery, HTTP, Kubernetes API."""
