"""Role flipping: which instance changes its role, and to which role.

Called once a second by a router's pool manager, and by the simulator, which compiles it. An
instance has a configured role and a current role. It first flips to MIXED, which takes requests of
both phases beside its own work, so that the flip costs little; it flips to the opposite role, or
back to its configured role, only under stricter conditions.

What is hard: to avoid flapping. Periodic traffic of any period would make a plain threshold
oscillate. So pressure must last for `rise_ms` before a flip, relief must last for the longer
`calm_ms` before a flip back, and each flip within `BACKOFF_RESET_MS` of the last one doubles the
minimal time until the flip back, up to `MAX_MIN_FLIP_MS`. That bounds the number of flips per hour.

Sources: Splitwise, section IV-A (own pool, mixed pool, opposite pool; identity kept, back when
drained); TetriInfer, section 3.5 (an instance under a tenth of its load for a minute is flipped).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = -1

PREFILL, DECODE, MIXED = 0, 1, 2
"""Roles, as numbers."""

FIRST_MIN_FLIP_MS = 4_000.0
MAX_MIN_FLIP_MS = 256_000.0
BACKOFF_RESET_MS = 1_800_000.0
"""After this time in its configured role, the next flip counts as the first one."""
LOW_PRESSURE = 0.5
"""A side is relieved when its pressure is below this."""
DEFAULT_WAIT_MS = 250.0
"""The threshold of waiting if there is no TTFT target."""
MAX_FLIP_MS = 300_000.0
"""If flipping is off, a flipped instance flips back after this time."""
IDLE_LOAD = 0.1
"""A decode instance below this share of its load limit counts as idle (TetriInfer)."""
NO_WAIT_MS = 1.0
"""A prefill instance is idle only without prompts (estimates of them may be rounded): where each is
computed at once, the wait is short although hardly any time is left."""
NEXT_REQUESTS = 3.0
"""Requests for which a decode instance that is not full has room (benchmarks/flips)."""
SPARE_MS = 1_000.0
"""A prefill instance that has been idle for so long can be spared."""

MEMBER = np.dtype(
    [
        ("wait_ms", np.float64),  # time until its waiting prompts are computed
        ("use", np.float64),  # share of its KV that is held, from `count_next`; 1: it is full
        ("since_ms", np.float64),  # when it took its role
        ("min_flip_ms", np.float64),  # minimal time until it flips back
        ("idle_ms", np.float64),  # since when it is idle in its configured role; inf: it is not
        ("configured_role", np.int64),
        ("role", np.int64),
        ("is_open", np.int64),  # whether it accepts requests
    ]
)
"""One instance. The caller fills in all fields but the three times, which this module updates."""

PRESSURE_HISTORY = np.dtype([("high_since_ms", np.float64), ("low_since_ms", np.float64)])
"""Since when a side has been under pressure, and since when relieved; inf: it is not."""

Member = Any
"""A record, or a dict of the same fields."""
Members = Sequence[Any] | NDArray[np.void]

PressureHistory = Sequence[Any] | NDArray[np.void]


class FlipThresholds(NamedTuple):
    """Thresholds of pressure and time for flips."""

    wait_ms: float
    """How long prompts may wait before other instances help."""
    rise_ms: float = 2_000.0
    """How long pressure must last before a flip."""
    calm_ms: float = 5_000.0
    """How long relief must last before a flip back."""
    idle_ms: float = 60_000.0
    """Idle time after which a MIXED instance takes the opposite role (TetriInfer)."""
    min_prefill: int = 1
    """Number of instances that always stay in the prefill role."""
    min_decode: int = 1
    """Number of instances that always stay in the decode role."""

    @property
    def headroom_ms(self) -> float:
        """How much longer prompts wait at prefill instances than at mixed ones, for which this is
        not enough pressure to flip (`dispatch.compute_headroom`)."""
        return LOW_PRESSURE * self.wait_ms


def build_thresholds(ttft_ms: float, min_prefill: int = 1, min_decode: int = 1) -> FlipThresholds:
    """The thresholds for a TTFT target; 0: there is no target.

    Prompts wait for as long as the target: each that a decode instance computes delays all requests
    that decode there, so it is only worth it where the prompt would be late anyway.
    """
    wait_ms = ttft_ms or DEFAULT_WAIT_MS
    return FlipThresholds(wait_ms, min_prefill=min_prefill, min_decode=min_decode)


def build_pressure_history() -> NDArray[np.void]:
    """The initial PRESSURE_HISTORY records, one for prefill and one for decode."""
    history = np.zeros(2, PRESSURE_HISTORY)
    history["high_since_ms"] = history["low_since_ms"] = math.inf
    return history


def build_members(count: int) -> NDArray[np.void]:
    """The initial MEMBER records of `count` instances."""
    members = np.zeros(count, MEMBER)
    members["idle_ms"] = math.inf
    return members


def build_plain_member() -> dict[str, Any]:
    """An initial MEMBER; fields of records take five times as long where nothing is compiled."""
    return dict.fromkeys(MEMBER.names or (), 0) | {"idle_ms": math.inf}


def build_plain_history() -> list[dict[str, Any]]:
    """As `build_pressure_history`, for plain members."""
    return [dict.fromkeys(PRESSURE_HISTORY.names or (), math.inf) for _ in range(2)]


def decide(
    members: Members, history: PressureHistory, thresholds: FlipThresholds, now_ms: float
) -> tuple[int, int]:
    """(slot, its new role), or (NONE, NONE); the caller records an executed flip with
    `record_role`.

    At most one flip at a time: the next decision sees its effect. `members` holds one MEMBER for
    each instance, `history` one PRESSURE_HISTORY for prefill and one for decode; the times in both
    are updated.
    In this order: 1. flip an instance back; 2. give an idle flipped instance the opposite role;
    3. flip the least loaded instance of the other side to MIXED, if that can spare one.
    """
    for side in range(2):
        past = history[side]
        is_high = 1.0 < compute_pressure(members, side, thresholds, True) < math.inf
        is_low = compute_pressure(members, side, thresholds, False) < LOW_PRESSURE
        past["high_since_ms"] = min(past["high_since_ms"], now_ms) if is_high else math.inf
        past["low_since_ms"] = min(past["low_since_ms"], now_ms) if is_low else math.inf
    _update_idle(members, thresholds, now_ms)
    slot = _find_member_to_return(members, history, thresholds, now_ms)
    if slot != NONE:
        return slot, members[slot]["configured_role"]
    for side in range(2):
        if history[side]["high_since_ms"] > now_ms - thresholds.rise_ms:
            continue
        slot = _find_idle_member(members, history, thresholds, side, now_ms)
        if slot != NONE:
            return slot, side
        if history[1 - side]["high_since_ms"] == math.inf:
            slot = _find_member_to_flip(members, thresholds, 1 - side, now_ms)
            if slot != NONE:
                return slot, MIXED
    return NONE, NONE


def compute_next_check_ms(
    members: Members, history: PressureHistory, thresholds: FlipThresholds, now_ms: float
) -> float:
    """The earliest time at which `decide` may return another result if no request arrives or ends.

    The simulator calls this after a decision of NONE to skip checks. It assumes that waiting
    prompts advance and nothing else changes. inf: the result will never change.
    """
    soonest = math.inf
    for side in range(2):
        past = history[side]
        soonest = min(soonest, _skip_past(past["high_since_ms"] + thresholds.rise_ms, now_ms))
        soonest = min(soonest, _skip_past(past["low_since_ms"] + thresholds.calm_ms, now_ms))
    for i in range(len(members)):
        member = members[i]
        idle_since_ms = max(member["idle_ms"], member["since_ms"])
        soonest = min(soonest, _skip_past(idle_since_ms + thresholds.idle_ms, now_ms))
        soonest = min(soonest, _skip_past(member["idle_ms"] + SPARE_MS, now_ms))
        soonest = min(soonest, _skip_past(member["since_ms"] + member["min_flip_ms"], now_ms))
        for share in (0.0, LOW_PRESSURE, 1.0):
            above_ms = member["wait_ms"] - share * thresholds.wait_ms
            if member["wait_ms"] > 0.0 and above_ms >= 0.0:
                soonest = min(soonest, now_ms + above_ms)
    return soonest


def count_next(use: float, running: int) -> float:
    """The share of KV that is held, `use`, if an instance with so many `running` requests gets
    `NEXT_REQUESTS` more of their mean size; above 1 it is full. What is free is little where
    requests are long, and plenty for thousands of short ones, so no share says that by itself."""
    return use + NEXT_REQUESTS * use / running if running else use


def return_flipped(members: Members, now_ms: float) -> tuple[int, int]:
    """(slot, its configured role), or (NONE, NONE): the flip back if flipping is off.

    It waits for `MAX_FLIP_MS`, as two managers may disagree briefly and users may set roles.
    """
    for i in range(len(members)):
        member = members[i]
        is_flipped = member["is_open"] and member["role"] != member["configured_role"]
        if is_flipped and now_ms - member["since_ms"] >= MAX_FLIP_MS:
            return i, member["configured_role"]
    return NONE, NONE


def record_role(members: Members, slot: int, role: int, now_ms: float) -> None:
    """Record that an instance has taken a new role."""
    member = members[slot]
    if member["role"] == member["configured_role"]:
        # Exponential back-off: a flip soon after the last one lasts twice as long.
        doubled = min(2.0 * member["min_flip_ms"], MAX_MIN_FLIP_MS)
        is_first = now_ms - member["since_ms"] > BACKOFF_RESET_MS or member["min_flip_ms"] == 0.0
        member["min_flip_ms"] = FIRST_MIN_FLIP_MS if is_first else doubled
    member["role"] = role
    member["since_ms"] = now_ms


def compute_pressure(
    members: Members, side: int, thresholds: FlipThresholds, with_flipped: bool
) -> float:
    """Load of the least loaded instance for prefill (0) or decode (1), 1 being the threshold.

    inf when no instance serves this side; then none is flipped to it. Without `with_flipped`,
    flipped instances of the other side do not count: they start empty, which is no relief yet.
    """
    least = math.inf
    for i in range(len(members)):
        member = members[i]
        if not member["is_open"] or member["role"] == 1 - side:
            continue
        if with_flipped or member["configured_role"] != 1 - side:
            least = min(least, _compute_load(member, side, thresholds))
    return least


def _compute_load(member: Member, side: int, thresholds: FlipThresholds) -> float:
    """Load of one instance for one side, relative to the threshold."""
    if side == PREFILL:
        return float(member["wait_ms"] / thresholds.wait_ms)
    return float(member["use"])


def _skip_past(at_ms: float, now_ms: float) -> float:
    """`at_ms`, or inf if it is in the past, with 1 ms of tolerance for rounding."""
    return at_ms if at_ms > now_ms - 1.0 else math.inf


def _update_idle(members: Members, thresholds: FlipThresholds, now_ms: float) -> None:
    for i in range(len(members)):
        member = members[i]
        if member["configured_role"] == PREFILL:
            is_idle = member["wait_ms"] < NO_WAIT_MS
        else:
            is_idle = _compute_load(member, DECODE, thresholds) < IDLE_LOAD
        member["idle_ms"] = min(member["idle_ms"], now_ms) if is_idle else math.inf


def _find_member_to_return(
    members: Members, history: PressureHistory, thresholds: FlipThresholds, now_ms: float
) -> int:
    """A flipped instance that may flip back: no longer needed, or needed in its configured role."""
    for i in range(len(members)):
        member = members[i]
        configured_role, role = member["configured_role"], member["role"]
        if role == configured_role or configured_role == MIXED or not member["is_open"]:
            continue
        if now_ms - member["since_ms"] < member["min_flip_ms"]:
            continue
        low_ms = history[1 - configured_role]["low_since_ms"]
        is_done = low_ms <= now_ms - thresholds.calm_ms and not _has_foreign_work(member)
        # In the opposite role it does not serve its configured role; a MIXED instance already does.
        high_ms = history[configured_role]["high_since_ms"]
        is_missed = role == 1 - configured_role and high_ms <= now_ms - thresholds.rise_ms
        if is_done or is_missed:
            return i
    return NONE


def _has_foreign_work(member: Member) -> bool:
    """Whether prompts still wait at a flipped decode instance."""
    return bool(member["wait_ms"] > 0.0) if member["configured_role"] == DECODE else False


def _find_idle_member(
    members: Members, history: PressureHistory, thresholds: FlipThresholds, side: int, now_ms: float
) -> int:
    """A MIXED instance of the other side that has long been idle there, if others remain."""
    idle, remaining = NONE, 0
    for i in range(len(members)):
        member = members[i]
        if member["is_open"] and member["role"] != side:
            remaining += 1
            is_flipped = member["configured_role"] == 1 - side and member["role"] == MIXED
            idle_since_ms = max(member["idle_ms"], member["since_ms"])
            if is_flipped and idle_since_ms <= now_ms - thresholds.idle_ms:
                idle = i
    return idle if remaining > 1 and history[1 - side]["low_since_ms"] < math.inf else NONE


def _find_member_to_flip(
    members: Members, thresholds: FlipThresholds, side: int, now_ms: float
) -> int:
    """The least loaded instance in its configured role `side`, if enough of them remain. One for
    prefill has to be idle for a while: if all are busy, the others cannot do its work."""
    best, least, count = NONE, math.inf, 0
    for i in range(len(members)):
        member = members[i]
        if not member["is_open"] or member["role"] != side or member["configured_role"] != side:
            continue
        count += 1
        load = _compute_load(member, side, thresholds)
        can_leave = side == DECODE or member["idle_ms"] <= now_ms - SPARE_MS
        if can_leave and load < least:
            best, least = i, load
    minimum = thresholds.min_prefill if side == PREFILL else thresholds.min_decode
    return best if count > minimum else NONE
