"""Follows the fleet and picks instances."""
