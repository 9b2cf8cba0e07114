"""Contracts between the tiers."""
