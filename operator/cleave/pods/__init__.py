"""Pod manifests from pools: pure functions."""
