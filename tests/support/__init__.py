"""Helpers that tests share: test doubles, fake clusters, reference simulators, sample inputs."""
