"""How far back an engine's cache reaches, by the clock that a router has of that cache.

Called by the router at each load report, and by the simulator, which compiles it. An engine reports
how long ago a request began to use the block whose latest use is the oldest one: what was used
since then it still has. A router knows uses only by a clock of tokens (`prefix_cache.is_cached`),
so it remembers when that clock was where. What is hard: a prompt that counts as evicted though it
is cached costs its computation, the opposite mistake only a wait. So errors are to make the window
longer, by a slack, by the oldest running request and by the steps of the history, and it never gets
longer than without a report: what is cached lasts no longer than until as much was written as the
KV holds.
"""

import math

NUM_SAMPLES = 64
HISTORY_SIZE = 1 + 2 * NUM_SAMPLES
"""Numbers of a history: that of its latest sample, from 0, and (ms, clock) of the latest samples in
a ring. Zeros are one that begins with the clock at 0."""
_SAMPLES_PER_CAPACITY = 32
"""While as much is written as the KV holds: so much too long may a window be."""
_SLACK_MS = 1_000.0
"""From a router's stamp to the use, without a queue: dispatch, the iteration before, the report."""
UNKNOWN = -math.inf
"""The clock of a horizon that is not known."""


def start_history(now_ms: float, clock: float) -> list[float]:
    """The clock of a boot, from when a process first knows of it."""
    return [0.0, now_ms, clock, *[0.0] * (HISTORY_SIZE - 3)]


def record_clock(history: list[float], begin_ms: float, clock: float, capacity: float) -> None:
    """Add a sample, if enough was written since the latest one. `begin_ms`: when the engine will
    use what is sent there now, behind what waits. `capacity`: what this router's prompts may fill
    of the KV, in the clock's unit."""
    latest = int(history[0])
    since = clock - history[2 + 2 * (latest % NUM_SAMPLES)]
    if since * _SAMPLES_PER_CAPACITY < capacity:
        return
    at = 1 + 2 * ((latest + 1) % NUM_SAMPLES)
    history[at] = begin_ms
    history[at + 1] = clock
    history[0] = latest + 1.0


def find_horizon(history: list[float], used_ms: float) -> float:
    """The clock before which the engine has evicted what was stamped. `used_ms`: its oldest use.

    UNKNOWN before the first sample: a process that came later than the boot does not know what
    others have stamped there, and the engine may still have it.
    """
    latest = int(history[0])
    for number in range(latest, max(latest - NUM_SAMPLES, -1), -1):
        at = 1 + 2 * (number % NUM_SAMPLES)
        if history[at] + _SLACK_MS <= used_ms:
            return history[at + 1]
    return UNKNOWN


def measure_window(clock: float, horizon: float, capacity: float) -> float:
    """For how long blocks stay cached, as `capacity` of `is_cached`: what was written since the
    horizon, at most as much as the KV holds."""
    return min(clock - horizon + 1.0, capacity)
