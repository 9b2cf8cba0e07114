"""OpenAI-compatible HTTP front."""
