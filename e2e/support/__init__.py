"""Helpers of the end-to-end tests: deployments, proxies, a Prometheus, prompts and hand-offs."""
