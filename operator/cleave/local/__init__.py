"""Deployments on one machine without a Kubernetes cluster: process kubelet, up, status, down."""
