"""The JSON of a gateway's `GET /fleet`, as types.

Written by the gateway, read by the operator. Unknown fields are skipped and missing ones have
defaults, because gateways and operator are not upgraded at the same time.
"""

import msgspec

MAX_CLOSED = 16
"""Names of prefill instances in one `KvPairs`."""
MAX_INSTANCES = 4_096
"""Limit of instances in one response: about 2 MB."""
MAX_REPORTS = 8
"""Instances in one response that report their model."""
MAX_REPORT_BRACES = 1_024
"""Limit of `{` in one such report; a config with its groups of caches has tens."""


class KvPath(msgspec.Struct, frozen=True):
    """Result of an instance's KV self-test."""

    verified: bool = False
    transport: str = ""
    """`nixl over tcp`, `emulated`, ..."""
    transfer_ms: float = 0.0
    """Time of the test's decode request to its first token."""
    bytes_per_s: float = 0.0
    """Bandwidth measured in the test; 0: not reported."""
    detail: str = ""
    pull_ms: float = 0.0
    """Time for which each rank of the decode engine pulled in the test; 0: not reported."""


class KvPairs(msgspec.Struct, frozen=True):
    """What canary handoffs into a decode instance have shown, by prefill instance."""

    total: int = 0
    """Prefill instances that may hand over to it; 0: it decodes for none."""
    proven: int = 0
    """Pairs whose newest canary was good."""
    closed: tuple[str, ...] = ()
    """Prefill instances with which it is not paired now; the first MAX_CLOSED of them."""
    num_closed: int = 0
    oldest_s: float = 0.0
    """Age of the oldest proof."""
    bytes_per_s: float = 0.0
    """Rate to one GPU of the slowest proven pair; 0: not measured."""
    pull_ms: float = 0.0
    """Time for which each rank pulled then."""
    reason: str = ""
    """What was wrong with the first closed pair."""


class CacheHits(msgspec.Struct, frozen=True):
    """What share of an instance's prompt tokens was cached in the last two minutes, 0..1."""

    predicted: float | None = None
    """As this gateway predicted; None: it sent no prompt there."""
    engine: float | None = None
    """As the engine reports; None: it does not, or there was no prompt."""


class FleetInstance(msgspec.Struct, frozen=True):
    """One instance in the registry of this gateway."""

    name: str
    """The pod's name."""
    deployment: str = ""
    model: str = ""
    revision: str = ""
    role: str = ""
    """`prefill`, `decode`, `mixed`: what it serves now."""
    home: str = ""
    """The configured role."""
    state: str = ""
    """`starting`, `verifying`, `ready`, `draining`."""
    epoch: int = 0
    """Epoch of the role."""
    contact: str = ""
    """Connection to its agent: heard, stale, silent, connection lost."""
    selectable: bool = False
    """Whether it takes new requests."""
    reason: str = ""
    """Why it is not ready."""
    restarts: int = 0
    """Restarts of its engine since its agent started."""
    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    """Prompt tokens to compute plus tokens with KV, as estimated by this gateway."""
    kv_cache_usage: float = 0.0
    """Used share, 0..1."""
    requests_in_flight: int = 0
    """Requests of this gateway."""
    report_age_s: float = 0.0
    """Time since the last event from the agent."""
    kv_path: KvPath = KvPath()
    kv_pairs: KvPairs = KvPairs()
    cache_hits: CacheHits = CacheHits()
    model_report: str = ""
    """What its engine reports about its model, JSON of `cleave.api.model_report.ModelReport`. Only
    the first ready instance of each revision and `model_digest` has it, as others say the same."""
    model_digest: str = ""
    """Hash of the config.json in its report, of every ready instance; empty: there is none."""

    weights: str = ""
    """Digest of what its engine has loaded; of a pod whose engines differ the oldest one and the
    newest one, with a dot between. Empty: nothing, or an earlier version's."""
    weights_read_s: float = 0.0
    """When its engine, or the last one of its pod, has read that, in seconds since 1970."""
    weights_fault: str = ""
    """Why other weights could have the same digest; empty: they could not."""

    adapters_digest: str = ""
    """Of the adapters that it was ordered last to load at run time; empty: it was not."""
    adapters_pending: int = 0
    """How many of them it has not loaded."""
    adapter_fault: str = ""
    """Why one of them is not loaded, with its name; of the first few instances with a reason."""


class FleetStatus(msgspec.Struct, frozen=True):
    """The response of one gateway."""

    instances: tuple[FleetInstance, ...] = ()
    left_out: int = 0
    """Number of instances omitted because of MAX_INSTANCES."""
    draining: bool = False
    """Whether this gateway is shutting down."""
