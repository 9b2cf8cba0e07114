"""One machine without a cluster: process kubelet, up, status, down."""
