"""Score tables: the scores of all instances of one deployment and revision.

Built by the registry when an instance opens or closes for requests (rare), updated for each pick,
release and load report (often), read by the router. Each revision has a separate table, so that
its prefill instances are never paired with decode instances of another revision.

What is hard: each request changes the scores of a few instances and reads those of all, and setting
or reading one element of a numpy array takes as long as searching a short list. So the scores of
few instances are kept in a list, those of many in an array.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache

import numpy as np

from cleave.api.enums import DispatchPolicy
from cleave.policy import dispatch
from cleave.policy.dispatch import (
    BY_REQUESTS,
    NONE,
    STALE_PENALTY,
    CellNumbers,
    ScoreColumn,
    Scores,
)
from cleave.policy.prompt_cost import count_all_mixed, count_mixed
from cleave.policy.queue_model import compute_mean_token_ms
from cleave.policy.session_affinity import to_key
from cleave.router.closed_pairs import ClosedPairs
from cleave.router.instance import BaseScoreTable, Connectivity, RoutedInstance, Target
from cleave.rpc.v1.agent_pb2 import ROLE_DECODE, ROLE_MIXED, ROLE_PREFILL

_STALE_CONTACT = Connectivity.STALE
"""Read for every request; an attribute of an enum is slow."""

_USES = ("prefill", "decode", "mixed", "colocated", "spare")
"""The columns of a score table."""
_POINTS = 16
"""Points of an instance on the ring of keys."""
_RING_SHIFT = 20
"""Bits of a point on it for the number of its instance."""
_MAX_RINGS = 32
"""Limit of rings that are kept, at most 1 MB for 1,000 instances each."""
MAX_LIST_INSTANCES = 24
"""Number of instances up to which lists are faster than arrays."""


class WritableScoreColumn(ScoreColumn):
    """A column that can be changed; +inf where the instance is closed for its use."""

    __slots__ = ()

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        raise NotImplementedError

    def to_list(self) -> list[float]:
        """All scores, for reading only."""
        raise NotImplementedError

    def to_array(self) -> Scores:
        """All scores, for reading only."""
        raise NotImplementedError


class ListScoreColumn(WritableScoreColumn):
    """A column in a list, for few instances: setting and reading one score is cheap."""

    __slots__ = ("_scores",)

    def __init__(self, scores: list[float]) -> None:
        """`scores`: used as they are, without a copy."""
        super().__init__(len(scores))
        self._scores = scores

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        self._scores[slot] = score

    def get_score(self, slot: int) -> float:
        """One score."""
        return self._scores[slot]

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        lowest, slot = math.inf, NONE
        for index, score in enumerate(self._scores):
            if score < lowest:
                lowest, slot = score, index
        return slot

    def to_list(self) -> list[float]:
        """The scores themselves."""
        return self._scores

    def to_array(self) -> Scores:
        """A copy."""
        return np.array(self._scores)


class ArrayScoreColumn(WritableScoreColumn):
    """A column in an array, for many instances: searching all scores is cheap."""

    __slots__ = ("_cells", "_scores")

    def __init__(self, scores: Scores) -> None:
        """`scores`: used as they are, without a copy."""
        super().__init__(scores.size)
        self._scores = scores
        self._cells: memoryview[float] = scores.data.cast("B").cast("d")

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        self._cells[slot] = score

    def get_score(self, slot: int) -> float:
        """One score."""
        return self._cells[slot]

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        return dispatch.find_least(self._scores)

    def to_list(self) -> list[float]:
        """A copy."""
        scores: list[float] = self._scores.tolist()
        return scores

    def to_array(self) -> Scores:
        """The scores themselves."""
        return self._scores


class ScoreTable(BaseScoreTable):
    """Columns of scores by slot: +inf where the instance is closed for the use of the column; empty
    if all are.

    Scores count what the policy compares: ms, tokens, requests or picks (`policy.dispatch.score`).
    STALE_PENALTY is added for instances without recent events: a busy machine starves agents long
    before engines, so such an instance is worse than any other but better than none.
    """

    __slots__ = (
        "_columns",
        "_counts",
        "_decode_kv",
        "_has_extra_columns",
        "_instance_columns",
        "_is_remote",
        "_is_short",
        "_kv_weights",
        "_most_kv",
        "_open",
        "_ring",
        "_ring_slots",
        "_role_ranks",
        "_sharing",
        "_uses",
        "batch",
        "cells",
        "closed_pairs",
        "colocated",
        "context",
        "decode",
        "heaviness",
        "instances",
        "is_remote",
        "is_shared",
        "keys",
        "mixed",
        "num_changes",
        "num_routers",
        "pending_prompt",
        "prefill",
        "prompt_slots",
        "room",
        "slot_by_boot",
        "slot_by_holder",
        "spare",
    )  # fmt: skip

    def __init__(
        self, instances: list[RoutedInstance], policy: DispatchPolicy = DispatchPolicy.PREFIX_AWARE
    ) -> None:
        self.instances = instances
        self.num_changes = 0
        """How often the boot, role or uses of an instance have changed."""
        rule = dispatch.RULES[policy]
        self._counts = rule.counts
        self._has_extra_columns = rule.decode in (dispatch.LIGHTEST, dispatch.FULLEST)
        size = len(instances)
        self._is_short = is_short = size <= MAX_LIST_INSTANCES and dispatch.is_by_score(rule)
        self._uses = [list_uses(instance) for instance in instances]
        """The uses that each slot is open for."""
        self._open = {
            use: {slot for slot, each in enumerate(self._uses) if use in each} for use in _USES
        }
        """The slots that are open for each use."""
        self._build_columns()
        self._decode_kv = [_count_decode_kv(each) for each in instances]
        self._compute_kv_weights()
        self.pending_prompt = _build_column(size, is_short, 0.0)
        """Pending prompt tokens, also of closed instances."""
        self.room = np.zeros(size)
        """Unclaimed KV tokens; as the next three, only for policies that compare them."""
        self.heaviness = np.zeros(size)
        """Ratio of heavy to light decoding requests."""
        self.batch = np.zeros(size)
        """Number of requests that decode or will do so."""
        self.context = np.zeros(size)
        """Their prompt and output tokens, weighted as in Aladdin."""
        self.keys = np.array([to_key(each.name) for each in instances], np.uint64)
        """Keys of the instances' names, for session affinity."""
        self.is_remote = np.zeros(size, np.bool_)
        """Instances in the share of another router; routers divide the instances among them."""
        self._is_remote = [False] * size
        """The same: a list, in which one is read in a fraction of the time."""
        self.is_shared = False
        """Whether other routers use these instances."""
        self.num_routers = 1
        """How many do, and this one."""
        self._ring: list[int] | None = None
        """From `build_ring`; None: not needed so far."""
        self._ring_slots: list[int] = []
        """Slots of the instances on it."""
        self.cells = _number_cells(instances)
        """Cell number of each slot; None: no instance has a cell."""
        decodes = np.array(["decode" in each for each in self._uses], np.bool_)
        self.closed_pairs = ClosedPairs(decodes)
        """Instances that must not be picked together."""
        self._role_ranks = _rank_by_role(instances)
        self.slot_by_boot = {each.target.boot_id: slot for slot, each in enumerate(instances)}
        """Slot by boot ID."""
        self.slot_by_holder = {each.target.holder: slot for slot, each in enumerate(instances)}
        """Slot by number in the index of cached prompts."""
        for slot in range(size):
            self.update(slot)

    def _build_columns(self) -> None:
        self._sharing = _find_sharing(self._open)
        self._columns = columns = _build_columns(self._open, len(self._uses), self._is_short)
        self.prefill = columns["prefill"]
        """Prefill phase: prefill instances with a verified KV path."""
        self.decode = columns["decode"]
        """Decode phase: decode and mixed instances with a verified KV path."""
        self.mixed = columns["mixed"]
        """Both phases: mixed instances."""
        self.colocated = columns["colocated"]
        """Both phases: mixed and decode instances."""
        self.spare = columns["spare"]
        """Both phases: prefill instances, the last resort."""
        selected = {uses: _select_columns(columns, uses) for uses in set(self._uses)}
        self._instance_columns = [selected[uses] for uses in self._uses]
        self._list_prompt_slots()

    def _compute_kv_weights(self) -> None:
        self._most_kv = most = max(self._decode_kv, default=0)
        self._kv_weights = [
            dispatch.compute_kv_weight(each.kv_tokens, most) for each in self.instances
        ]

    def _list_prompt_slots(self) -> None:
        self.prompt_slots = sorted(self._open["prefill"] or self._open["colocated"])
        """Slots of the instances that compute prompts."""

    def update_uses(self, slot: int, before: Target) -> None:
        """Apply that an instance has opened or closed for some uses, or has another role or boot
        than its target of `before`. In a large table that takes a tenth of the time of building a
        new one, which agents could cause without end."""
        instance = self.instances[slot]
        target, uses = instance.target, list_uses(instance)
        self.num_changes += 1
        if target.boot_id != before.boot_id:
            self.slot_by_boot.pop(before.boot_id, None)
            self.slot_by_holder.pop(before.holder, None)
            self.slot_by_boot[target.boot_id] = self.slot_by_holder[target.holder] = slot
        if target.role != before.role:
            self._rank_again()
        if uses != self._uses[slot]:
            self._change_uses(slot, uses)
        self._decode_kv[slot] = _count_decode_kv(instance)
        self._kv_weights[slot] = dispatch.compute_kv_weight(instance.kv_tokens, self._most_kv)
        if max(self._decode_kv) != self._most_kv:
            self._compute_kv_weights()
            self._update_all()
        ScoreTable.update(self, slot)

    def _rank_again(self) -> None:
        self._role_ranks, self._ring = _rank_by_role(self.instances), None
        if self.is_shared:
            for slot, instance in enumerate(self.instances):
                self._update_share(slot, instance)

    def _change_uses(self, slot: int, uses: tuple[str, ...]) -> None:
        before, self._uses[slot] = self._uses[slot], uses
        for use in set(before).symmetric_difference(uses):
            self._open[use].symmetric_difference_update((slot,))
        if _find_sharing(self._open) == self._sharing:
            for use in set(before).difference(uses):
                self._columns[use].set_score(slot, math.inf)
            self._instance_columns[slot] = _select_columns(self._columns, uses)
            self._list_prompt_slots()
        else:
            self._build_columns()
            self._update_all()
        self.closed_pairs.set_open(slot, is_open="decode" in uses)

    def _update_all(self) -> None:
        for slot in range(len(self._uses)):
            ScoreTable.update(self, slot)

    def update_pairs(self, now: float) -> None:
        """Recompute the closed pairs; `now`: seconds of the registry's clock."""
        closed = self.closed_pairs
        closed.expiry_s = math.inf
        for slot, instance in enumerate(self.instances):
            if closed.count or instance.closed_until:
                self.update_pairs_of(slot, now)

    def update_pairs_of(self, slot: int, now: float) -> None:
        """Recompute the closed pairs of one decode instance."""
        until = self.instances[slot].closed_until
        slots, closed = self.slot_by_boot, self.closed_pairs
        if until or closed.count:
            boots = {boot: end for boot, end in until.items() if now < end and boot in slots}
            closed.update(slot, {slots[boot]: end for boot, end in boots.items()})

    def find_shortest_wait(self, totals: WritableScoreColumn) -> int:
        """The slot with the least of `measure_waits`; NONE: all are closed."""
        if totals.size > MAX_LIST_INSTANCES:
            pending = self.pending_prompt.to_array()
            return dispatch.find_least(count_all_mixed(pending, totals.to_array()))
        tokens, shortest, least = self.pending_prompt.to_list(), math.inf, NONE
        for slot, total in enumerate(totals.to_list()):
            wait = count_mixed(tokens[slot], total)
            if wait < shortest:
                shortest, least = wait, slot
        return least

    def measure_waits(self, totals: WritableScoreColumn) -> WritableScoreColumn:
        """`prompt_cost.count_mixed` of a column that counts the load of both phases."""
        if totals.size > MAX_LIST_INSTANCES:
            pending = self.pending_prompt.to_array()
            return ArrayScoreColumn(count_all_mixed(pending, totals.to_array()))
        tokens, waits = self.pending_prompt.to_list(), totals.to_list().copy()
        for slot in range(len(waits)):
            waits[slot] = count_mixed(tokens[slot], waits[slot])
        return ListScoreColumn(waits)

    def find_own(self, scores: WritableScoreColumn, margin: float, now: float) -> int:
        """`dispatch.prefer_own` of a column, for few instances without arrays."""
        if scores.size > MAX_LIST_INSTANCES:
            return dispatch.prefer_own(scores.to_array(), self.is_remote, margin, now)
        local, remote, least, least_remote = NONE, NONE, math.inf, math.inf
        is_remote = self._is_remote
        for slot, score in enumerate(scores.to_list()):
            if is_remote[slot]:
                if score < least_remote:
                    remote, least_remote = slot, score
            elif score < least:
                local, least = slot, score
        if local == NONE or remote == NONE:
            return local if remote == NONE else remote
        return remote if dispatch.prefers_remote(least, least_remote, margin, now) else local

    def find_preferred(self, key: int, scores: WritableScoreColumn) -> int:
        """The open instance that all gateways prefer for a key of 32 bits; NONE: all are closed.

        By consistent hashing of the instances' names: when one is added or removed, only its keys
        move. With more instances a search costs the same; rendezvous hashing would
        cost more.
        """
        ring, slots = self._ring, self._ring_slots
        if ring is None:
            instances = self.instances
            slots = [s for s, each in enumerate(instances) if each.registration.role != ROLE_DECODE]
            ring = build_ring(tuple([instances[slot].name for slot in slots]))
            self._ring, self._ring_slots = ring, slots
        start = bisect_left(ring, key << _RING_SHIFT)
        for at in range(len(ring)):
            slot = slots[ring[(start + at) % len(ring)] & (1 << _RING_SHIFT) - 1]
            if scores.get_score(slot) < math.inf:
                return slot
        return NONE

    def refresh(self) -> None:
        """Load changes of other processes; without shared load there are none."""

    def find_shortest_queue(self) -> float:
        """Pending prompt tokens of the shortest prompt queue; +inf: none computes prompts."""
        pending = self.pending_prompt.to_list()
        shortest = math.inf
        for slot in self.prompt_slots:  # compiled, a generator would cost an allocation
            shortest = min(shortest, pending[slot])
        return shortest

    def find_headroom(self, wait_ms: float) -> float:
        """Most prompt tokens that may wait more at a prefill instance than at the mixed ones
        (`dispatch.compute_headroom`); 0 where there are not both."""
        if not (self.prefill.size and self.mixed.size):
            return 0.0
        return max(compute_headroom_of(self.instances[s], wait_ms) for s in self.prompt_slots)

    def update(self, slot: int) -> None:
        """Recompute the scores of an instance from its load."""
        instance = self.instances[slot]
        if self._has_extra_columns or self.is_shared or instance.num_routers > 1:
            self._update_extra_columns(slot, instance)
        in_flight = instance.in_flight
        by_prompt, by_all = self._instance_columns[slot]
        prefills = by_prompt is not None
        penalty = STALE_PENALTY if instance.connectivity is _STALE_CONTACT else 0.0
        counts = self._counts
        by_requests = counts == BY_REQUESTS
        prompt, prompts, resident = in_flight.count_pending(prefills or by_requests)
        requests = 0.0
        if by_requests:
            requests = in_flight.count_requests() + in_flight.num_remote_requests
        turn, queue = in_flight.last_pick, in_flight.queue
        resident *= self._kv_weights[slot]
        first, total = dispatch.score(
            counts, prompt, prompts, resident, requests, turn, queue, penalty, prefills
        )
        self.pending_prompt.set_score(slot, prompt + penalty)
        if by_prompt is not None:
            by_prompt.set_score(slot, first)
        for column in by_all:
            column.set_score(slot, total)

    def _update_extra_columns(self, slot: int, instance: RoutedInstance) -> None:
        if self.is_shared or instance.num_routers > 1:
            self._update_share(slot, instance)
            self.is_shared = True
            self.num_routers = instance.num_routers
        if not self._has_extra_columns:
            return
        in_flight, registration = instance.in_flight, instance.registration
        resident = in_flight.resident.pending
        self.room[slot] = registration.kv_blocks_total * registration.kv_block_size - resident
        heavy, batch = in_flight.num_heavy, len(in_flight.decoding_requests)
        self.heaviness[slot] = dispatch.compute_heavy_ratio(heavy, batch - heavy)
        self.batch[slot] = in_flight.count_decoding()
        self.context[slot] = in_flight.measure_context()

    def _update_share(self, slot: int, instance: RoutedInstance) -> None:
        rank = self._role_ranks[slot] % instance.num_routers
        is_remote = rank != instance.router_rank
        if self._is_remote[slot] != is_remote:
            self._is_remote[slot] = self.is_remote[slot] = is_remote


@lru_cache(_MAX_RINGS)
def build_ring(names: tuple[str, ...]) -> list[int]:
    """Points of instances on a ring of 32-bit keys, in ascending order: each is a key, and in its
    lowest bits the number of the name. Kept, because tables are built again when an instance
    opens or closes."""
    return sorted(
        to_key(f"{point}/{name}") << _RING_SHIFT | number
        for number, name in enumerate(names)
        for point in range(_POINTS)
    )


def compute_headroom_of(instance: RoutedInstance, wait_ms: float) -> float:
    """`dispatch.compute_headroom` of a prefill instance, by what it has learned."""
    queue = instance.in_flight.queue
    prompts = queue.count_prompts(1.0)
    mean_token_ms = compute_mean_token_ms(queue.prompt_ms, queue.token_ms, prompts)
    return dispatch.compute_headroom(wait_ms, mean_token_ms)


def list_uses(instance: RoutedInstance) -> tuple[str, ...]:
    """The uses (`_USES`) for which an instance is open."""
    if not instance.selectable:
        return ()
    role = instance.registration.role
    verified = instance.registration.kv_path.verified
    if role == ROLE_PREFILL:
        return ("prefill", "spare") if verified else ("spare",)
    if role == ROLE_DECODE:
        return ("decode", "colocated") if verified else ("colocated",)
    if role == ROLE_MIXED:
        return ("decode", "colocated", "mixed") if verified else ("colocated", "mixed")
    return ()


def _find_sharing(slots: Mapping[str, Collection[int]]) -> list[str]:
    """For each use the one whose column it has; empty where no slot is open. Uses with the same
    open slots share a column, but for `prefill`, whose scores count prompts only."""
    sharing: list[str] = []
    for number, use in enumerate(_USES):
        others = (each for each in _USES[1:number] if slots[each] == slots[use])
        sharing.append(next(others, use) if slots[use] else "")
    return sharing


def _count_decode_kv(instance: RoutedInstance) -> int:
    """Its KV tokens; 0 where it decodes only while it is lent."""
    registration = instance.registration
    role = registration.home or registration.role
    return 0 if role == ROLE_PREFILL else instance.kv_tokens


def _build_columns(
    slots: Mapping[str, Collection[int]], size: int, short: bool
) -> dict[str, WritableScoreColumn]:
    """Columns by use; `slots`: those that are open for it."""
    columns: dict[str, WritableScoreColumn] = {}
    for use, other in zip(_USES, _find_sharing(slots), strict=True):
        if other not in columns:
            columns[use] = _build_column(size if other else 0, short or not other)
        else:
            columns[use] = columns[other]
    return columns


def _select_columns(
    columns: dict[str, WritableScoreColumn], uses: Collection[str]
) -> tuple[WritableScoreColumn | None, list[WritableScoreColumn]]:
    """(the column scored by prompts, the columns scored by the load of both phases) of a slot."""
    by_all = {id(columns[use]): columns[use] for use in uses if use != "prefill"}
    return columns["prefill"] if "prefill" in uses else None, [*by_all.values()]


def _rank_by_role(instances: list[RoutedInstance]) -> list[int]:
    counts: Counter[int] = Counter()
    ranks = []
    for instance in instances:
        role = instance.registration.role
        ranks.append(counts[role])
        counts[role] += 1
    return ranks


def _number_cells(instances: list[RoutedInstance]) -> CellNumbers | None:
    """The cell number of each instance; instances without a cell form one more. None: no cells."""
    names = [instance.registration.cell for instance in instances]
    if not any(names):
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _build_column(size: int, is_short: bool, score: float = math.inf) -> WritableScoreColumn:
    return ListScoreColumn([score] * size) if is_short else ArrayScoreColumn(np.full(size, score))
