"""What keeping each adapter's requests together is worth, by how much longer they may wait for it.

Called by run.py. Instances compute one prompt after another and hold few adapters; bringing another
one takes a while, in which nothing is computed. Its place is found by
`policy.session_affinity.find_session_instance`, as the router finds it.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from queueing import WARM_UP, Load, draw_load

from cleave.policy.dispatch import TIE_WEIGHT, find_least
from cleave.policy.session_affinity import find_session_instance, to_key

SLOTS = 4
"""Adapters that an instance holds."""
BRING_MS = 100.0
"""To read one from disk and copy it to the GPU."""
WORTHS = (0.0, 1024.0, 2048.0, 4096.0)
"""Tokens; 0: adapters are not looked at."""
SKEW = 1.0
"""Of Zipf's law: how often each adapter is requested."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fleet, load and number of adapters."""

    instances: int
    load: float
    adapters: int
    worth: float
    mean_ms: float
    """From arrival to the prompt's own computation."""
    brought: float
    """Share of the requests that an adapter was brought for."""


def measure(
    prompt_tokens: NDArray[np.int64], instances: int, load: float, adapters: int, requests: int
) -> list[Row]:
    """A row for each worth; the same requests, with lengths drawn from `prompt_tokens`."""
    drawn = draw_load(
        prompt_tokens, instances=instances, utilisation=load, requests=requests, seed=1, error=0.2
    )
    shares = 1.0 / np.arange(1, adapters + 1) ** SKEW
    requested = np.random.default_rng(2).choice(adapters, requests, p=shares / shares.sum())
    found = (_serve(drawn, requested, instances, worth) for worth in WORTHS)
    return [
        Row(instances, load, adapters, worth, *row)
        for worth, row in zip(WORTHS, found, strict=True)
    ]


def _serve(
    load: Load, requested: NDArray[np.int64], instances: int, worth: float
) -> tuple[float, float]:
    """(mean delay in ms, share of requests with an adapter brought), least pending tokens."""
    keys = np.array([to_key(f"chat-{n}") for n in range(instances)], np.uint64)
    names = [to_key(f"adapter-{n}") for n in range(int(requested.max()) + 1)]
    pending = np.arange(instances) * TIE_WEIGHT
    free_at = [0.0] * instances
    loaded: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(instances)]
    ends: list[tuple[float, int, float]] = []
    delays = np.zeros(len(requested))
    brought = 0
    for r, (now, service_ms, tokens, adapter) in enumerate(
        zip(load.arrival_ms, load.service_ms, load.tokens, requested, strict=True)
    ):
        while ends and ends[0][0] <= now:
            _, ended, done = heapq.heappop(ends)
            pending[ended] -= done
        i = (
            find_session_instance(pending, keys, names[adapter], worth)
            if worth
            else find_least(pending)
        )
        begin = max(free_at[i], now)
        if adapter in loaded[i]:
            loaded[i].move_to_end(adapter)
        else:
            begin += BRING_MS
            brought += 1
            loaded[i][adapter] = None
            if len(loaded[i]) > SLOTS:
                loaded[i].popitem(last=False)
        free_at[i] = begin + service_ms
        delays[r] = begin - now
        # A tie goes to who had its last request longest ago.
        pending[i] += tokens + TIE_WEIGHT
        heapq.heappush(ends, (free_at[i], i, tokens))
    return float(delays[int(WARM_UP * len(delays)) :].mean()), brought / len(delays)
