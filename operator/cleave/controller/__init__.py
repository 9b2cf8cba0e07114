"""The operator: watches resources of a cluster and reconciles it with their specs."""
