"""A Kubernetes cluster for tests: a real control plane, nodes that run pods as processes.

Tests take it from the fixture `cluster` (`e2e/conftest.py`); `python -m e2e.cluster` keeps one
running for a person. It lives in a network of its own (`scripts/isolated`), in which the
addresses of pods and Services are local.
"""
