"""Programs that a test cluster is made of, built by `scripts/cluster-tools` and kept."""

import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_BUILD_TIMEOUT_S = 3600


@cache
def folder() -> Path:
    """Where etcd, the parts of the control plane, kubectl and helm are; built if need be."""
    done = subprocess.run(
        [REPOSITORY / "scripts" / "cluster-tools"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=True,
    )
    return Path(done.stdout.strip())
