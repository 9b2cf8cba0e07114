"""What authors of deployments and pools may have in pods, which the operator creates for them."""
