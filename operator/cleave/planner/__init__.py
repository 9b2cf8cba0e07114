"""Plans deployments: searches pools that meet an SLO, and decides when to replace them."""
