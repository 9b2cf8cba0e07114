"""Figures that cross process borders."""
