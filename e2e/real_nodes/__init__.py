"""A test cluster whose nodes are real: kubelet, containerd, runc and kube-proxy on this machine.

`make e2e-node` runs cluster tests on it. `sandbox` makes the namespaces, `real_cluster` fills them.
"""
