"""Checks whether this process may lock the memory that RDMA registers.

Called by the agent's main at its start and by `readiness` for the detail of the KV path. Network
cards read and write locked memory only. Where the limit is too low the registration fails, and UCX
takes TCP without a word. The capability IPC_LOCK lifts the limit for root only.
"""

import resource
from pathlib import Path

DEVICES = Path("/dev/infiniband")
_ENOUGH_BYTES = 2**40
"""More than the KV caches and weights of one node."""


def explain_limit(devices: Path = DEVICES) -> str | None:
    """Return why RDMA cannot register memory; None: it can, or there is no RDMA device."""
    if not devices.is_dir():
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= _ENOUGH_BYTES:
        return None
    return (
        f"RDMA cannot register memory: this process may lock {limit // 1024} KiB; set "
        "LimitMEMLOCK=infinity for the container runtime of the nodes"
    )
