"""Kubernetes manifests of deployments and pools: pure functions."""
