"""A fleet as arrays for the compiled code. Built once by callers that simulate a fleet often."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.policy.dispatch import (
    RULES,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    compute_headroom,
    compute_kv_weight,
    is_by_score,
)
from cleave.policy.queue_model import DEFAULT_SUMS, DEFAULT_TOKEN_MS
from cleave.policy.role_flipping import PREFILL, build_members
from cleave.simulator import records
from cleave.simulator.fleet import (
    Batching,
    CacheView,
    DispatchPolicy,
    SimulatedEngine,
    SimulatedFleet,
)
from cleave.simulator.role_flipping import CHECK_PERIOD_MS
from cleave.simulator.validation import SimulationError, check_engine, check_fleet


@dataclass(frozen=True, slots=True, eq=False)
class PreparedFleet:
    """A fleet as arrays for the compiled code; simulations copy what they change."""

    fleet: SimulatedFleet
    instances: records.Records
    slots: records.Records
    state: records.Records
    max_batch: int
    """Upper bound of the batch of any instance: every request holds at least one block."""
    max_block: int
    max_stages: int
    tables: NDArray[np.float64]
    scores: NDArray[np.float64]
    tree: NDArray[np.int64]
    members: records.Records


def prepare_fleet(fleet: SimulatedFleet) -> PreparedFleet:
    """Validate a fleet and convert it to arrays. Raises SimulationError."""
    roles = ((records.PREFILL, fleet.prefill), (records.DECODE, fleet.decode))
    pools = [(role, pool) for role, some in (*roles, (records.MIXED, fleet.mixed)) for pool in some]
    if not any(pool.replicas for _, pool in pools):
        raise SimulationError("the fleet has no instances; give at least one pool with replicas")
    for _, pool in pools:
        check_engine(pool.engine)
    check_fleet(fleet)
    tables = _PointTable()
    kinds = [_build_instance(role, pool.engine, tables) for role, pool in pools]
    instances = np.repeat(np.concatenate(kinds), [pool.engines for _, pool in pools])
    if fleet.has_connector:
        instances["defers_free"] = instances["schedules_ahead"]
    rows = np.arange(len(instances))
    of_pool = np.cumsum([0, *(pool.engines for _, pool in pools)])
    first_of_pool = np.repeat(of_pool[:-1], np.diff(of_pool))
    instances["first_rank"] = rows - (rows - first_of_pool) % instances["ranks"]
    tokens = instances["blocks"] * instances["block"]
    most = tokens.max(initial=0, where=instances["role"] != PREFILL)
    instances["kv_weight"] = [compute_kv_weight(each, most) for each in tokens]
    stages = instances["stages"]
    instances["first_slot"] = np.cumsum(stages) - stages
    slots = np.zeros(int(stages.sum()), records.SLOT)
    for name in ("oldest", "youngest", "first_prompt", "fresh", "next"):
        slots[name] = records.NONE
    return PreparedFleet(
        fleet,
        instances,
        slots,
        _build_state(fleet, instances),
        int(np.minimum(instances["max_seqs"], instances["blocks"]).max()),
        int(instances["block"].max()),
        int(stages.max()),
        np.array(tables.points),
        _build_scores(fleet, instances),
        _build_tree(len(instances)),
        _build_members(instances["role"]),
    )


class _PointTable:
    """Points of latency models, one after another."""

    def __init__(self) -> None:
        self.points: list[float] = []

    def add(self, points: tuple[float, ...]) -> tuple[int, int]:
        """Append the points of one table; (index of the first, number of points)."""
        start = len(self.points)
        self.points += points
        return start, len(points)


def _build_instance(role: int, engine: SimulatedEngine, tables: _PointTable) -> records.Records:
    row = np.zeros(1, records.INSTANCE)
    timing = engine.timing
    blocks = engine.kv_capacity_tokens // engine.kv_block_size
    is_vllm = engine.batching is Batching.VLLM
    schedules_ahead = timing.schedules_ahead and timing.stages == 1 and is_vllm
    prompt, decode = tables.add(timing.prompt_ms), tables.add(timing.decode_ms)
    context = tables.add(timing.decode_context_ms)
    mixed = tables.add(timing.mixed_context_ms) if timing.mixed_context_ms else context
    values: dict[str, Any] = {
        "prompt_step": timing.prompt_step,
        "prompt_square": timing.prompt_square_ms,
        "hop": timing.hop_ms,
        "hop_token": timing.hop_token_ms,
        "host_token": engine.host_token_ms,
        "host_blocks": engine.host_capacity_tokens // engine.kv_block_size,
        "host_tokens": engine.host_capacity_tokens,
        "next": math.inf,
        "wake": math.inf,
        "scheduled": 0.0 if schedules_ahead else math.inf,
        "schedules_ahead": schedules_ahead,
        "role": role,
        "batching": engine.batching,
        "order": engine.order,
        "admission": engine.admission,
        "ttft_ms": engine.ttft_ms,
        "tpot_ms": engine.tpot_ms,
        "block": engine.kv_block_size,
        "blocks": blocks,
        "free": blocks,
        "max_seqs": engine.max_num_seqs,
        "max_tokens": engine.max_num_batched_tokens,
        "sched_batch": engine.prefill_sched_batch,
        "stages": timing.stages,
        "ranks": engine.ranks,
        "partial": records.NONE,
        "last_in_time": records.NONE,
        "first_ended": records.NONE,
        "first_sent": records.NONE,
        "first_assigned": records.NONE,
        "token_ms": DEFAULT_TOKEN_MS,
        "upper_token_ms": DEFAULT_TOKEN_MS,
    }
    sums = (name for name in row.dtype.names or () if name.startswith("sum_"))
    values |= zip(sums, DEFAULT_SUMS, strict=True)
    values["prompt_table"], values["prompt_points"] = prompt
    values["decode_table"], values["decode_points"] = decode
    values["context_table"], values["context_points"] = context
    values["mixed_table"], values["mixed_points"] = mixed
    reserves = engine.batching in (Batching.ORCA, Batching.FASTER_TRANSFORMER)
    values["caches"] = engine.prefix_caching and not reserves
    if reserves:
        # -1: reserve for the longest request of the trace.
        values["reserve"] = -(-(engine.max_model_len or 0) // engine.kv_block_size) or -1
    for name, value in values.items():
        row[name] = value
    return row


def _build_state(fleet: SimulatedFleet, instances: records.Records) -> records.Records:
    row = np.zeros(1, records.STATE)
    transfer = fleet.transfer
    role, rule = instances["role"], RULES[fleet.dispatch]
    values: dict[str, Any] = {
        "counts": rule.counts,
        "prefill_pick": rule.prefill,
        "decode_pick": rule.decode,
        "is_by_score": is_by_score(rule),
        "is_deferred": fleet.defers_dispatch,
        "dispatch_ms": fleet.dispatch_ms,
        "short_prompt_tokens": fleet.short_prompt_tokens,
        "latency": transfer.latency_ms,
        "token": transfer.token_ms,
        "overlapped_token": transfer.overlapped_token_ms,
        "receiver": transfer.receiver_ms,
        "receiver_token": transfer.receiver_token_ms,
        "overlap_from": transfer.overlap_from_tokens,
        "is_shared": transfer.is_shared,
        "first_by_decode": fleet.first_token_by_decode,
        "has_prefill": bool((role != records.DECODE).any()),
        "has_decode": bool((role != records.PREFILL).any()),
        "num_instances": len(instances),
        "cache_view": _choose_view(fleet),
        "pulls_prefixes": fleet.pulls_prefixes and _choose_view(fleet) is not CacheView.NOTHING,
        "num_leaves": _count_leaves(len(instances)),
        "max_block": instances["block"].max(),
        "max_stages": instances["stages"].max(),
    }
    values["next_flip_check"] = math.inf
    if fleet.flipping is not None:
        values |= fleet.flipping._asdict() | {"next_flip_check": CHECK_PERIOD_MS}
        values["headroom_ms"] = fleet.flipping.headroom_ms
    if fleet.best_fit is not None:
        limits = asdict(fleet.best_fit)
        values |= limits.pop("coefficients") | limits
    for name, value in values.items():
        row[name] = value
    return row


def _choose_view(fleet: SimulatedFleet) -> CacheView:
    """What dispatch knows of caches; NOTHING if its policy does not use it."""
    uses_caches = fleet.dispatch is DispatchPolicy.PREFIX_AWARE
    return fleet.cache_view if uses_caches and not fleet.defers_dispatch else CacheView.NOTHING


def _build_scores(fleet: SimulatedFleet, instances: records.Records) -> NDArray[np.float64]:
    role = instances["role"]
    scores = np.zeros((records.NUM_COLUMNS, len(role)))
    scores[records.ROOM] = instances["blocks"] * instances["block"]
    scores[TO_PREFILL, role != records.PREFILL] = np.inf
    scores[TO_DECODE, role == records.PREFILL] = np.inf
    scores[TO_WHOLE, role != records.MIXED] = np.inf
    if fleet.flipping is not None:
        headroom = compute_headroom(fleet.flipping.headroom_ms, DEFAULT_TOKEN_MS)
        scores[records.HEADROOM, role == records.PREFILL] = headroom
    return scores


def _build_members(roles: NDArray[np.int64]) -> records.Records:
    members = build_members(len(roles))
    members["configured_role"] = members["role"] = roles
    members["is_open"] = 1
    return members


def _count_leaves(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _build_tree(count: int) -> NDArray[np.int64]:
    leaves = _count_leaves(count)
    tree = np.full(2 * leaves, records.NONE, np.int64)
    tree[leaves : leaves + count] = range(count)
    for at in range(leaves - 1, 0, -1):
        tree[at] = tree[2 * at]
    return tree
