"""From a deployment to a placement."""
