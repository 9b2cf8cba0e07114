"""Cleave: control plane that serves language models from prefill, decode and mixed pools."""
