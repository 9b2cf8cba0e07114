"""Admission: API keys, tenants and their limits, fair queueing, refusal of late requests."""
