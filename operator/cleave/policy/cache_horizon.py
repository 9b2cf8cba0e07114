"""How far back an engine's cache reaches, by the clock that a router has of that cache.

Called by the router at each load report, and by the simulator, which compiles it. An engine reports
how long ago a request began to use the block whose latest use is the oldest one: what was used
since then it still has. A router knows uses only by a clock of tokens (`prefix_cache.is_cached`),
so it remembers when that clock was where. What is hard: a prompt that counts as evicted though it
is cached costs its computation, the opposite mistake only a wait. So all errors are to make the
window longer: by a slack, by the oldest running request, and by the steps of the history.
"""

NUM_SAMPLES = 64
HISTORY_SIZE = 1 + 2 * NUM_SAMPLES
"""Numbers of a history: that of its latest sample, from 0, and (ms, clock) of the latest samples in
a ring. Zeros are one that begins with the clock at 0."""
_SAMPLES_PER_CAPACITY = 32
"""While as much is written as the KV holds: so much too long may a window be."""
_SLACK_MS = 1_000.0
"""From a router's stamp to the use, without a queue: dispatch, the iteration before, the report."""
MAX_RATIO = 2.0
"""Of a window to what the KV holds: a block in use keeps the time when its request began."""
UNKNOWN = -1.0
"""No clock."""


def start_history(now_ms: float, clock: float) -> list[float]:
    """The clock of a boot, from when a process first knows of it; 0 then: from its start."""
    return [0.0, now_ms, clock, *[0.0] * (HISTORY_SIZE - 3)]


def record_clock(history: list[float], now_ms: float, clock: float, capacity: float) -> None:
    """Add a sample, if enough was written since the latest one. `capacity`: what this router's
    prompts may fill of the KV, in the clock's unit."""
    latest = int(history[0])
    since = clock - history[2 + 2 * (latest % NUM_SAMPLES)]
    if since * _SAMPLES_PER_CAPACITY < capacity:
        return
    at = 1 + 2 * ((latest + 1) % NUM_SAMPLES)
    history[at] = now_ms
    history[at + 1] = clock
    history[0] = latest + 1.0


def find_horizon(history: list[float], used_ms: float, wait_ms: float) -> float:
    """The clock before which the engine has evicted what was stamped. `used_ms`: its oldest use.
    `wait_ms`: of prompts that are sent there now.

    UNKNOWN before the first sample of a process that came later than the boot: other processes have
    stamped blocks there that the engine may still have.
    """
    used_ms -= wait_ms + _SLACK_MS
    latest, clock = int(history[0]), 0.0
    for number in range(latest, max(latest - NUM_SAMPLES, -1), -1):
        at = 1 + 2 * (number % NUM_SAMPLES)
        clock = history[at + 1]
        if history[at] <= used_ms:
            return clock
    return clock if clock == 0.0 or latest >= NUM_SAMPLES else UNKNOWN


def measure_window(clock: float, horizon: float, capacity: float) -> float:
    """For how long blocks stay cached, as `capacity` of `is_cached`: what was written since the
    horizon, or as much as the KV holds if that is UNKNOWN."""
    if horizon < 0.0:
        return capacity
    return min(clock - horizon + 1.0, MAX_RATIO * capacity)
