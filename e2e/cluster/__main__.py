"""`scripts/isolated .venv/bin/python -m e2e.cluster [COMMAND...]`: a cluster to play with.

Runs COMMAND (a shell without one) with KUBECONFIG set and kubectl and helm on PATH, on a cluster
with two nodes of eight GPUs that ends with it. In `e2e.real_nodes.sandbox`: with two real nodes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from e2e.cluster.cluster import opened
from e2e.cluster.nodes import gpu_node

os.environ.pop("KUBECONFIG", None)
with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as cluster:
    if cluster.nodes is not None:
        cluster.nodes.add(gpu_node("node-a", clique="a"), gpu_node("node-b", clique="b"))
    env = os.environ | {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": f"{cluster.programs}:{os.environ['PATH']}",
        "CLUSTER_FOLDER": folder,
    }
    command = sys.argv[1:] or [os.environ.get("SHELL", "sh")]
    sys.exit(subprocess.run(command, env=env, check=False).returncode)
