"""Shapes of models, from their config.json."""
