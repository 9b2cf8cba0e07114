"""The scores of the instances that may be paired: one deployment, one revision.

Built by the registry whenever openness changes (rare), updated per dispatch, release and report
(often), read by the router's pick. Unlike revisions have tables of their own, so that a prefill of
one can never meet a decode of the other.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from cleave.api.enums import DispatchPolicy
from cleave.policy.dispatch import (
    BY_REQUESTS,
    FULLEST,
    LIGHTEST,
    RULES,
    STALE_PENALTY,
    CellNumbers,
    compute_heavy_ratio,
    is_by_score,
    score,
)
from cleave.policy.session_affinity import to_key
from cleave.router.instance import BaseScoreTable, Connectivity, RoutedInstance
from cleave.router.score_column import ArrayScoreColumn, ListScoreColumn, WritableScoreColumn
from cleave.rpc.v1.agent_pb2 import ROLE_DECODE, ROLE_MIXED, ROLE_PREFILL

_STALE_CONTACT = Connectivity.STALE
"""Looked up for every request, which takes an enum a while."""

_USES = ("prefill", "decode", "mixed", "colocated", "spare")
"""A score table has a column for each."""
MAX_LIST_INSTANCES = 24
"""Up to so many instances lists are faster than arrays."""


class ScoreTable(BaseScoreTable):
    """Scores, +inf where the instance is closed for a use, empty where all are.

    They count tokens, or what else the policy compares: requests, or turns.

    STALE is added to whatever an instance that is not heard scores: a busy machine starves agents
    long before engines, so it is still better than none, and worse than any other.
    """

    __slots__ = (
        "_counts",
        "_has_extra_columns",
        "_instance_columns",
        "_role_ranks",
        "batch",
        "cells",
        "colocated",
        "context",
        "decode",
        "heaviness",
        "instances",
        "is_remote",
        "is_shared",
        "keys",
        "mixed",
        "pending_prompt",
        "prefill",
        "prompt_slots",
        "room",
        "slot_by_boot",
        "spare",
    )

    def __init__(
        self, instances: list[RoutedInstance], policy: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT
    ) -> None:
        self.instances = instances
        rule = RULES[policy]
        self._counts = rule.counts
        self._has_extra_columns = rule.decode in (LIGHTEST, FULLEST)
        size = len(instances)
        is_short = size <= MAX_LIST_INSTANCES and is_by_score(rule)
        uses = [list_uses(instance) for instance in instances]
        columns = _build_columns(uses, is_short)
        self.prefill = columns["prefill"]
        """Prompt of a split request: prefill instances with a verified KV path."""
        self.decode = columns["decode"]
        """Its decoding: decode and mixed instances with a verified KV path."""
        self.mixed = columns["mixed"]
        """Whole requests on mixed instances, which are meant for them."""
        self.colocated = columns["colocated"]
        """Whole requests on mixed and decode instances."""
        self.spare = columns["spare"]
        """Whole requests on prefill instances, when nothing else is left."""
        self._instance_columns = [_select_columns(columns, its) for its in uses]
        self.pending_prompt = _build_column(size, is_short, 0.0)
        """Prompt tokens that wait; nothing is closed."""
        self.room = np.zeros(size)
        """KV tokens that nobody has claimed; like all below for the policies that compare it."""
        self.heaviness = np.zeros(size)
        """Heavy to light decodes."""
        self.batch = np.zeros(size)
        """Requests that decode, or will."""
        self.context = np.zeros(size)
        """Their prompts and outputs, as Aladdin weighs them."""
        self.keys = np.array([to_key(each.name) for each in instances], np.uint64)
        """For sessions."""
        self.is_remote = np.zeros(size, np.bool_)
        """Instances that are home to another router: all that follow them share them out."""
        self.is_shared = False
        """Whether any is away."""
        self.cells = _number_cells(instances)
        """Which cell each is in; None: nobody states one."""
        self._role_ranks = _rank_by_role(instances)
        self.slot_by_boot = {each.target.boot_id: slot for slot, each in enumerate(instances)}
        """Slot of each boot of an engine."""
        computes = "prefill" if self.prefill.size else "colocated"
        self.prompt_slots = [slot for slot, its in enumerate(uses) if computes in its]
        """Slots of those that compute prompts."""
        for slot in range(size):
            self.update(slot)

    def refresh(self) -> None:
        """Take in what others did that score the same instances; there are none here."""

    def find_shortest_queue(self) -> float:
        """Prompt tokens that wait where prompts are computed and the fewest do; +inf: nowhere."""
        pending = self.pending_prompt.to_list()
        least = math.inf
        for slot in self.prompt_slots:
            least = min(least, pending[slot])
        return least

    def find_boot(self, slot: int) -> str:
        """The boot of the engine on a slot."""
        return self.instances[slot].target.boot_id

    def update(self, slot: int) -> None:
        """Score one instance anew from its load."""
        instance = self.instances[slot]
        if self._has_extra_columns or self.is_shared or instance.num_routers > 1:
            self._update_extra_columns(slot, instance)
        in_flight = instance.in_flight
        by_prompt, by_all = self._instance_columns[slot]
        prefills = by_prompt is not None
        doubt = STALE_PENALTY if instance.connectivity is _STALE_CONTACT else 0.0
        counts = self._counts
        by_requests = counts == BY_REQUESTS
        prompt, prompts, resident = in_flight.count_pending(prefills or by_requests)
        requests = (
            in_flight.count_requests() + in_flight.num_remote_requests if by_requests else 0.0
        )
        first, total = score(
            counts,
            prompt,
            prompts,
            resident,
            requests,
            in_flight.last_pick,
            in_flight.queue,
            doubt,
            prefills,
        )
        self.pending_prompt.set_score(slot, prompt + doubt)
        if by_prompt is not None:
            by_prompt.set_score(slot, first)
        for column in by_all:
            column.set_score(slot, total)

    def _update_extra_columns(self, slot: int, instance: RoutedInstance) -> None:
        """What is compared besides scores."""
        if self.is_shared or instance.num_routers > 1:
            self.is_remote[slot] = (
                self._role_ranks[slot] % instance.num_routers != instance.router_rank
            )
            self.is_shared = True
        if self._has_extra_columns:
            self._update_load_columns(slot, instance)

    def _update_load_columns(self, slot: int, instance: RoutedInstance) -> None:
        """What only few policies look at."""
        in_flight, registration = instance.in_flight, instance.registration
        held = in_flight.resident.pending
        self.room[slot] = registration.kv_blocks_total * registration.kv_block_size - held
        self.heaviness[slot] = compute_heavy_ratio(
            in_flight.num_heavy, len(in_flight.decoding_requests) - in_flight.num_heavy
        )
        self.batch[slot] = len(in_flight.decoding_requests)
        self.context[slot] = in_flight.weighted_context + held - in_flight.resident.own


def list_uses(instance: RoutedInstance) -> Collection[str]:
    """What an instance is open for."""
    if not instance.selectable:
        return ()
    role = instance.registration.role
    split = instance.registration.kv_path.verified
    if role == ROLE_PREFILL:
        return ("prefill", "spare") if split else ("spare",)
    if role == ROLE_DECODE:
        return ("decode", "colocated") if split else ("colocated",)
    if role == ROLE_MIXED:
        return ("decode", "colocated", "mixed") if split else ("colocated", "mixed")
    return ()


def _build_columns(
    uses: Sequence[Collection[str]], is_short: bool
) -> dict[str, WritableScoreColumn]:
    """By use, given those of each slot. What the same slots are open for is one column."""
    columns: dict[str, WritableScoreColumn] = {}
    known: dict[tuple[bool, tuple[int, ...]], WritableScoreColumn] = {}
    for use in _USES:
        slots = tuple(slot for slot, its in enumerate(uses) if use in its)
        size = len(uses) if slots else 0
        # Only this one counts the prompts alone.
        alike = use == "prefill", slots
        known.setdefault(alike, _build_column(size, is_short or not size))
        columns[use] = known[alike]
    return columns


def _select_columns(
    columns: dict[str, WritableScoreColumn], uses: Collection[str]
) -> tuple[WritableScoreColumn | None, list[WritableScoreColumn]]:
    """(the column scored by pending prompt tokens, columns scored by all pending tokens)"""
    by_all = {id(columns[use]): columns[use] for use in uses if use != "prefill"}
    return columns["prefill"] if "prefill" in uses else None, [*by_all.values()]


def _rank_by_role(instances: list[RoutedInstance]) -> list[int]:
    """The place of each instance among those of its role."""
    counts: Counter[int] = Counter()
    places = []
    for instance in instances:
        role = instance.registration.role
        places.append(counts[role])
        counts[role] += 1
    return places


def _number_cells(instances: list[RoutedInstance]) -> CellNumbers | None:
    """Numbers for the names of cells; those without one are together in one more."""
    names = [instance.registration.cell for instance in instances]
    if not any(names):
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _build_column(size: int, is_short: bool, score: float = math.inf) -> WritableScoreColumn:
    return ListScoreColumn(size, score) if is_short else ArrayScoreColumn(np.full(size, score))
