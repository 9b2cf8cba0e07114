"""What a gateway says of its fleet at `GET /fleet`: the JSON as types.

Written by the gateway, read by the operator. Fields that the other side does not know yet are
skipped, and those that it no longer sends have defaults: gateways and operator are not replaced in
the same instant.
"""

import msgspec

MAX_INSTANCES = 4_096
"""In one page: about 2 MB."""


class KvPath(msgspec.Struct, frozen=True):
    """Result of an instance's KV self-test."""

    verified: bool = False
    transport: str = ""
    """`nixl over tcp`, `emulated`, ..."""
    transfer_ms: float = 0.0
    """Of the test's decode request, to its first token."""
    bytes_per_s: float = 0.0
    """Measured in the test; 0: not told."""
    detail: str = ""


class Instance(msgspec.Struct, frozen=True):
    """One instance as this gateway sees it."""

    name: str
    """The pod's name."""
    deployment: str = ""
    model: str = ""
    revision: str = ""
    role: str = ""
    """`prefill`, `decode`, `mixed`: what it serves now."""
    home: str = ""
    """The role that it was made for."""
    state: str = ""
    """`starting`, `verifying`, `ready`, `draining`."""
    epoch: int = 0
    """Of the role."""
    contact: str = ""
    """How well its agent is heard: heard, stale, silent, connection lost."""
    selectable: bool = False
    """Whether it is given new requests."""
    reason: str = ""
    """Why it is not ready."""
    restarts: int = 0
    """Of its engine, since its agent started."""
    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    """Prompt tokens to compute and tokens that hold KV, as this gateway estimates them."""
    kv_cache_usage: float = 0.0
    """Used share, 0..1."""
    requests_in_flight: int = 0
    """Of this gateway."""
    report_age_s: float = 0.0
    """Since the agent was last heard."""
    kv_path: KvPath = KvPath()


class FleetPage(msgspec.Struct, frozen=True):
    """Everything one gateway knows."""

    instances: tuple[Instance, ...] = ()
    left_out: int = 0
    """Instances beyond what the page may hold."""
    draining: bool = False
    """Whether this gateway ends."""
