"""The operator: watches resources of a cluster and makes what they ask for."""
