"""Measures a model's operators with torch on one GPU and its collectives on several."""
