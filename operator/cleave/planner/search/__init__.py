"""The search for the placement with the highest goodput (DistServe)."""
