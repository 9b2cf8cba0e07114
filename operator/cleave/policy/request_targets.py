"""Latency targets of a request, which gateways send to engines with it. Pure.

They are in `vllm_xargs`, the field of a request that vLLM passes on to its plug-ins: written by the
gateway, read by the schedulers of the emulated engine and of vLLM. Requests of other clients have
none: they are never late, and no TPOT limits when they join. The rest of a stream that was lost has
no target for its first token, which its client has.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

TTFT_KEY = "cleave_ttft_left_ms"
TPOT_KEY = "cleave_tpot_ms"
_MAX_MS = 1e12
"""What is not below counts as no target: callers other than gateways may send any number."""


class RequestTargets(NamedTuple):
    """Milliseconds; inf: no target."""

    ttft_left_ms: float = math.inf
    """Until the target for the first token, from when the request reaches the engine; negative if
    that has passed."""
    tpot_ms: float = math.inf


NO_TARGETS = RequestTargets()


def read_targets(fields: Mapping[str, object] | None) -> RequestTargets:
    """The targets among the extra fields of a request."""
    if not fields or not (TTFT_KEY in fields or TPOT_KEY in fields):
        return NO_TARGETS
    return RequestTargets(_read_ms(fields, TTFT_KEY), _read_ms(fields, TPOT_KEY))


def _read_ms(fields: Mapping[str, object], key: str) -> float:
    value = fields.get(key)
    if isinstance(value, int | float) and abs(value) < _MAX_MS:
        return float(value)
    return math.inf
