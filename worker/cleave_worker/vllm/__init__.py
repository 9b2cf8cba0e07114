"""Plug-ins that vLLM loads through its entry points and options."""
