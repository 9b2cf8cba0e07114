"""Cleave worker: agent, engine launcher and emulated engine."""
