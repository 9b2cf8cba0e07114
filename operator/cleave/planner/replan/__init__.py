"""Whether another plan replaces the running one, by replaying observed traffic."""
