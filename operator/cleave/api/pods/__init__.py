"""What authors may say of pods, as Kubernetes checks it."""
