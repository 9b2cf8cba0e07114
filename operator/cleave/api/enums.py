"""Choices of the API that other packages act on, each defined once. Standard library only."""

from enum import StrEnum


class DispatchPolicy(StrEnum):
    """Which instances a request gets, of those that may take it; `policy.dispatch.RULES` says how.

    The values are those of `spec.routing.policy` and of the gateway's `--policy`.
    """

    SHORTEST_WAIT = "ShortestWait"
    PENDING_TOKENS = "PendingTokens"
    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    LEAST_REQUESTS = "LeastRequests"
    POWER_OF_TWO = "PowerOfTwo"
    LEAST_HEAVY = "LeastHeavy"
    BEST_FIT = "BestFit"
    PREFIX_AWARE = "PrefixAware"
