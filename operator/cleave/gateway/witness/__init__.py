"""Proves the KV path of every pair of engines, again and again."""
