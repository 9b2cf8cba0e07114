"""Plug-ins that vLLM loads through its own doors."""
