"""Choices and patterns of the API that other packages act on, each defined once. Standard library
only."""

from enum import StrEnum


class DispatchPolicy(StrEnum):
    """Which instances a request gets, of those that may take it (`policy.dispatch.RULES`):
    values of `spec.routing.policy` and of the gateway's `--policy`."""

    SHORTEST_WAIT = "ShortestWait"
    PENDING_TOKENS = "PendingTokens"
    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    LEAST_REQUESTS = "LeastRequests"
    POWER_OF_TWO = "PowerOfTwo"
    LEAST_HEAVY = "LeastHeavy"
    BEST_FIT = "BestFit"
    PREFIX_AWARE = "PrefixAware"


class FallbackPolicy(StrEnum):
    """When a request that should be split may run whole on a decode instance instead."""

    ALWAYS = "Always"
    """Whenever no prefill instance is available or the handoff failed."""
    NEVER = "Never"
    ON_PREFILL_LOSS = "OnPrefillLoss"
    """Only after a prefill attempt of this very request was lost."""


class LateRequestPolicy(StrEnum):
    """What happens to a request that can no longer meet its TTFT target."""

    SERVE = "Serve"
    REFUSE = "Refuse"
    """429 at once, so that its client can go elsewhere and other requests are not delayed."""


class FlippingMode(StrEnum):
    """Whether instances change roles when traffic changes."""

    OFF = "Off"
    """No flips; flipped instances flip back."""
    ADVISORY = "Advisory"
    """Flips are logged and counted, but not executed."""
    AUTO = "Auto"


ORIGIN = r"^(\*|[a-z][-a-z0-9+.]*://([-a-z0-9._]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$"
"""SCHEME://HOST or SCHEME://HOST:PORT as browsers send it, or `*` for all origins. Browsers send no
host with `*` and encode letters of other alphabets (xn--), so neither would ever be equal."""
