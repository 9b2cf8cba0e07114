"""Which instance changes its role, and to what: pools that lend each other instances.

Called once a second by a router's pool manager, and by the simulator, which compiles it. An
instance's home is the pool that it was made for; a role is what it serves now. It lends itself as
MIXED, which takes whole requests and hand-offs beside its own work, so lending costs nobody
anything at once; taking back and lending for good are done with care.

What is hard: not to flap. A wave of traffic of any period would drive a plain threshold from side
to side. So what rises must stay up for a while before anything happens, what comes home must have
been calm for longer, and each trip within `FORGIVEN_MS` of the last one doubles the time that the
instance stays away at least, up to `LONGEST_STAY_MS`. That bounds the flips of an hour.

Sources: Splitwise, section IV-A (own pool, mixed pool, opposite pool; identity kept, back when
drained); TetriInfer, section 3.5 (an instance under a tenth of its load for a minute is flipped).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = -1

PREFILL, DECODE, MIXED = 0, 1, 2
"""Roles, as numbers."""

FIRST_STAY_MS = 4_000.0
LONGEST_STAY_MS = 256_000.0
FORGIVEN_MS = 1_800_000.0
"""After so long at home an instance goes out as if for the first time."""
RELIEF = 0.5
"""Pressure has gone when it is below this."""
EARLY_MS = 500.0
"""Before prompts have waited for their whole TTFT target others help: it takes some time until they
do, and each prompt that decode instances compute delays the answers there."""
WAIT_SHARE = 0.25
"""Of the TTFT target, that prompts may wait in any case."""
UNSTATED_WAIT_MS = 250.0
"""The same where there is no target."""
AWAY_MS = 300_000.0
"""Where nobody lends any more, who has been away for so long goes home."""
IDLE = 0.1
"""An instance with less than this of what it might carry has nothing to do (TetriInfer)."""

MEMBER = np.dtype(
    [
        ("wait_ms", np.float64),  # until the prompts that wait there are computed
        ("use", np.float64),  # of its KV, by prompts that are computed: 0 to 1 and more
        ("since_ms", np.float64),  # when it took its role
        ("stay_ms", np.float64),  # how long it stays away at least, this time
        ("idle_ms", np.float64),  # since when it has little work of its home's kind; inf: it has
        ("home", np.int64),
        ("role", np.int64),
        ("is_open", np.int64),  # whether it takes requests at all
    ]
)
"""One instance. Whoever decides fills in all but the three times, which are kept here."""

WATCH = np.dtype([("high_ms", np.float64), ("low_ms", np.float64)])
"""Since when a side is under pressure, and since when it is relieved; inf: it is not."""

Members = NDArray[np.void]
Watch = NDArray[np.void]


class Terms(NamedTuple):
    """What a fleet promises, and how patient its manager is."""

    wait_ms: float
    """How long a prompt may wait before others help."""
    full: float = 0.9
    """Share of its KV from which on a decode instance is full."""
    rise_ms: float = 1_000.0
    """Pressure lasts so long before anybody is lent."""
    calm_ms: float = 5_000.0
    """Relief lasts so long before anybody comes home."""
    idle_ms: float = 60_000.0
    """Without work of its own for so long, an instance is lent for good (TetriInfer)."""
    min_prefill: int = 1
    """Instances that keep to prefill, whatever comes."""
    min_decode: int = 1


def make_terms(ttft_ms: float, min_prefill: int = 1, min_decode: int = 1) -> Terms:
    """Of a fleet with this TTFT target; 0: it has none."""
    wait_ms = max(ttft_ms - EARLY_MS, WAIT_SHARE * ttft_ms) or UNSTATED_WAIT_MS
    return Terms(wait_ms, min_prefill=min_prefill, min_decode=min_decode)


def make_watch() -> Watch:
    """Nothing has been seen yet."""
    watch = np.zeros(2, WATCH)
    watch["high_ms"] = watch["low_ms"] = math.inf
    return watch


def make_members(count: int) -> Members:
    """Instances that have done nothing yet."""
    members = np.zeros(count, MEMBER)
    members["idle_ms"] = math.inf
    return members


def decide(members: Members, watch: Watch, terms: Terms, now_ms: float) -> tuple[int, int]:
    """(slot, its new role), or (NONE, NONE); `take` notes that it was done.

    One flip at a time: the next decision sees what it has changed. `members` holds one MEMBER for
    each instance, `watch` one WATCH for prompts and one for decoding. What is seen for how long is
    noted in both.
    """
    for side in range(2):
        seen = watch[side]
        is_high = 1.0 < find_pressure(members, side, terms, True) < math.inf
        is_low = find_pressure(members, side, terms, False) < RELIEF
        seen["high_ms"] = min(seen["high_ms"], now_ms) if is_high else math.inf
        seen["low_ms"] = min(seen["low_ms"], now_ms) if is_low else math.inf
    _note_idle(members, terms, now_ms)
    slot = _find_returning(members, watch, terms, now_ms)
    if slot != NONE:
        return slot, members[slot]["home"]
    for side in range(2):
        if watch[side]["high_ms"] > now_ms - terms.rise_ms:
            continue
        slot = _find_idle(members, watch, terms, side, now_ms)
        if slot != NONE:
            return slot, side
        if watch[1 - side]["high_ms"] == math.inf:
            slot = _find_lender(members, terms, 1 - side)
            if slot != NONE:
                return slot, MIXED
    return NONE, NONE


def find_next_ms(members: Members, watch: Watch, terms: Terms, now_ms: float) -> float:
    """When `decide` may do or note something else at the soonest, while time alone goes on.

    For who has just heard NONE and need not look each second, as the simulator. Prompts that wait
    get on; nothing else changes. inf: it will never have more to say.
    """
    soonest = math.inf
    for side in range(2):
        seen = watch[side]
        soonest = min(soonest, _find_due(seen["high_ms"] + terms.rise_ms, now_ms))
        soonest = min(soonest, _find_due(seen["low_ms"] + terms.calm_ms, now_ms))
    for i in range(len(members)):
        member = members[i]
        idle_since_ms = max(member["idle_ms"], member["since_ms"])
        soonest = min(soonest, _find_due(idle_since_ms + terms.idle_ms, now_ms))
        soonest = min(soonest, _find_due(member["since_ms"] + member["stay_ms"], now_ms))
        for share in (0.0, IDLE, RELIEF, 1.0):
            above_ms = member["wait_ms"] - share * terms.wait_ms
            if member["wait_ms"] > 0.0 and above_ms >= 0.0:
                soonest = min(soonest, now_ms + above_ms)
    return soonest


def recall(members: Members, now_ms: float) -> tuple[int, int]:
    """(slot, its new role), or (NONE, NONE), where nobody is to be lent: who was, goes home.

    Not at once: two managers may disagree for a moment, and somebody may try roles by hand.
    """
    for i in range(len(members)):
        member = members[i]
        is_away = member["is_open"] and member["role"] != member["home"]
        if is_away and now_ms - member["since_ms"] >= AWAY_MS:
            return i, member["home"]
    return NONE, NONE


def take(members: Members, slot: int, role: int, now_ms: float) -> None:
    """Note that an instance has taken the role that was decided."""
    member = members[slot]
    if member["role"] == member["home"]:
        # It sets out: sooner after the last time, longer.
        doubled = min(2.0 * member["stay_ms"], LONGEST_STAY_MS)
        is_forgiven = now_ms - member["since_ms"] > FORGIVEN_MS or member["stay_ms"] == 0.0
        member["stay_ms"] = FIRST_STAY_MS if is_forgiven else doubled
    member["role"] = role
    member["since_ms"] = now_ms


def find_present(claimed: float, pending: float) -> float:
    """Share of the tokens that instances have been `claimed` for whose prompts are computed.

    KV of prompts that wait (`pending` tokens, of the whole fleet) is nowhere yet. Counted as if it
    were, a queue of prompts would look like a want of memory, and take an instance from prefill.
    """
    return max(1.0 - pending / claimed, 0.0) if claimed > 0.0 else 1.0


def find_pressure(members: Members, side: int, terms: Terms, lent: bool) -> float:
    """1 when the best instance for prompts (0) or decoding (1) has all that it should have.

    inf when no instance does it, and then nobody is lent to it either. Without `lent` those count
    only that are made for it: who is lent is empty at first, which is no relief to the others.
    """
    least = math.inf
    for i in range(len(members)):
        member = members[i]
        if not member["is_open"] or member["role"] == 1 - side:
            continue
        if lent or member["home"] != 1 - side:
            least = min(least, _find_load(member, side, terms))
    return least


def _find_load(member: Members, side: int, terms: Terms) -> float:
    """What one instance has to do for one side, beside what it should have."""
    return float(
        member["wait_ms"] / terms.wait_ms if side == PREFILL else member["use"] / terms.full
    )


def _find_due(at_ms: float, now_ms: float) -> float:
    """inf for what was due before; a ms of it is left to rounding."""
    return at_ms if at_ms > now_ms - 1.0 else math.inf


def _note_idle(members: Members, terms: Terms, now_ms: float) -> None:
    for i in range(len(members)):
        member = members[i]
        is_idle = _find_load(member, member["home"], terms) < IDLE
        member["idle_ms"] = min(member["idle_ms"], now_ms) if is_idle else math.inf


def _find_returning(members: Members, watch: Watch, terms: Terms, now_ms: float) -> int:
    """Who has been away long enough and is not needed there, or is needed at home."""
    for i in range(len(members)):
        member = members[i]
        home, role = member["home"], member["role"]
        if role == home or home == MIXED or not member["is_open"]:
            continue
        if now_ms - member["since_ms"] < member["stay_ms"]:
            continue
        is_done = watch[1 - home]["low_ms"] <= now_ms - terms.calm_ms and not _has_foreign(member)
        # Lent for good it does nothing for its home; MIXED it does already what it can.
        is_missed = role == 1 - home and watch[home]["high_ms"] <= now_ms - terms.rise_ms
        if is_done or is_missed:
            return i
    return NONE


def _has_foreign(member: Members) -> bool:
    """Whether work of the other kind waits at an instance that may come home."""
    return bool(member["wait_ms"] > 0.0) if member["home"] == DECODE else False


def _find_idle(members: Members, watch: Watch, terms: Terms, side: int, now_ms: float) -> int:
    """Who is lent to `side` and has had nothing else to do for long, if others stay."""
    idle, others = NONE, 0
    for i in range(len(members)):
        member = members[i]
        if member["is_open"] and member["role"] != side:
            others += 1
            is_lent = member["home"] == 1 - side and member["role"] == MIXED
            if is_lent and max(member["idle_ms"], member["since_ms"]) <= now_ms - terms.idle_ms:
                idle = i
    return idle if others > 1 and watch[1 - side]["low_ms"] < math.inf else NONE


def _find_lender(members: Members, terms: Terms, side: int) -> int:
    """The least busy of the instances of `side` that are at home, if it can be spared."""
    best, least, count = NONE, math.inf, 0
    for i in range(len(members)):
        member = members[i]
        if not member["is_open"] or member["role"] != side or member["home"] != side:
            continue
        count += 1
        busy = _find_load(member, side, terms)
        if busy < least:
            best, least = i, busy
    spared = terms.min_prefill if side == PREFILL else terms.min_decode
    return best if count > spared else NONE
