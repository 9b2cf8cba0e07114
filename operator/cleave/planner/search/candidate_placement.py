"""A placement before it is predicted: groups of instances, and the fleet that simulates them.

The search creates, changes and compares these placements. What is hard: a large placement, or one
whose prefill and decode instances must share nodes, consists of equal cells; one cell is simulated
at its share of the rate. Real requests may choose among all cells and are never served worse.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, reduce

from cleave.api.enums import DispatchPolicy
from cleave.api.planning import Objective
from cleave.api.role import Role
from cleave.perf.hardware.kv_transfer import KvTransferModel, build_kv_transfer
from cleave.perf.hardware.link import Link, select_slower
from cleave.perf.published import aladdin
from cleave.perf.timing import EngineTiming
from cleave.planner.plan import PlannedKvLink, PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.search.candidates import PlannedInstance
from cleave.policy.best_fit import BestFitModel
from cleave.simulator.fleet import SimulatedFleet, SimulatedPool, SimulatedTransfer

_PROMPT_TOKENS = 2048
"""Prompt length at which the compute time per prompt token is taken."""


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Equal instances of one role."""

    role: Role
    instance: PlannedInstance
    replicas: int

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.instance.candidate.gpus


@dataclass(frozen=True, slots=True)
class CandidatePlacement:
    """Groups, at most one per role, in the order prefill, decode, mixed."""

    groups: tuple[InstanceGroup, ...]
    copies: int = 1
    """Number of equal cells; `groups` describes one of them."""
    is_in_node: bool = False
    """The same pipeline stage of all instances of a cell lies in one node (Algorithm 2)."""

    @property
    def gpus(self) -> int:
        """GPUs of all cells."""
        return self.copies * sum(group.gpus for group in self.groups)

    @property
    def is_disaggregated(self) -> bool:
        """Whether there are prefill instances."""
        return self.count_replicas(Role.PREFILL) > 0

    @property
    def has_ranks(self) -> bool:
        """Whether an instance has several data-parallel ranks."""
        return any(group.instance.engine.ranks > 1 for group in self.groups)

    def get_resources(self, objective: Objective) -> float:
        """Resources of all cells in the unit of the objective: GPUs, price of an hour, watts."""
        return self.copies * sum(
            group.replicas * group.instance.candidate.get_resources(objective)
            for group in self.groups
        )

    def count_replicas(self, role: Role) -> int:
        """Number of instances of `role` in one cell."""
        return sum(group.replicas for group in self.groups if group.role is role)

    def change_replicas(self, changes: dict[Role, int]) -> "CandidatePlacement":
        """A copy with `changes` added to replicas per role; a role without replicas is dropped."""
        counted = (replace(g, replicas=g.replicas + changes.get(g.role, 0)) for g in self.groups)
        return replace(self, groups=tuple(group for group in counted if group.replicas > 0))

    def add_group(self, group: InstanceGroup) -> "CandidatePlacement":
        """A copy with `group` added, merged with the group of the same role."""
        if self.count_replicas(group.role):
            return self.change_replicas({group.role: group.replicas})
        groups = sorted((*self.groups, group), key=lambda each: list(Role).index(each.role))
        return replace(self, groups=tuple(groups))

    def with_copies(self, copies: int) -> "CandidatePlacement":
        """A copy that consists of `copies` cells."""
        return replace(self, copies=copies)


def build_cell(problem: Problem, placement: CandidatePlacement) -> SimulatedFleet:
    """One cell as a simulator fleet; it serves the rate divided by `placement.copies`."""
    policies = problem.policies
    estimates = [group.instance.candidate.estimate for group in placement.groups]
    dispatch, best_fit = _choose_dispatch(problem, placement)
    return SimulatedFleet(
        prefill=_build_pools(placement, Role.PREFILL),
        decode=_build_pools(placement, Role.DECODE),
        mixed=_build_pools(placement, Role.MIXED),
        transfer=build_transfer(problem, placement),
        dispatch=dispatch,
        best_fit=best_fit,
        dispatch_ms=policies.dispatch_ms + max(each.front_end_ms for each in estimates),
        first_token_by_decode=policies.first_token_by_decode,
    )


def build_deployed_cell(
    problem: Problem, placement: CandidatePlacement, whole_below_tokens: int
) -> SimulatedFleet:
    """The same with what gateways do beside: they flip roles, and decode instances compute prompts
    of up to `whole_below_tokens`. Flips of several data-parallel ranks are not simulated.

    The search has fixed roles: its bounds are those of each pool by itself.
    """
    fleet = build_cell(problem, placement)
    may_flip = placement.is_disaggregated and not placement.has_ranks
    flipping = problem.policies.flipping if may_flip else None
    return replace(fleet, flipping=flipping, short_prompt_tokens=whole_below_tokens)


def _choose_dispatch(
    problem: Problem, placement: CandidatePlacement
) -> tuple[DispatchPolicy, BestFitModel | None]:
    """The policy of the gateways, and for best fit the iteration times that they learn. Without
    those they send each request where the fewest tokens are pending, and so does the fleet."""
    if problem.policies.dispatch is not DispatchPolicy.BEST_FIT:
        return problem.policies.dispatch, None
    timings = {group.role: group.instance.candidate.estimate.timing for group in placement.groups}
    first = placement.groups[0].role
    learned = _fit_timings(timings[first], timings.get(Role.DECODE, timings[first]))
    if learned is None:
        return DispatchPolicy.PENDING_TOKENS, None
    model = BestFitModel(learned, problem.slo.ttft_ms, problem.slo.tpot_ms)
    return DispatchPolicy.BEST_FIT, model


@lru_cache(maxsize=256)
def _fit_timings(prefill: EngineTiming, decode: EngineTiming) -> aladdin.Coefficients | None:
    """`aladdin.fit_timings`, once for each pair of engines; a search builds many fleets of them."""
    return aladdin.fit_timings(prefill, decode)


def build_transfer(problem: Problem, placement: CandidatePlacement) -> SimulatedTransfer:
    """The KV transfer from prefill to decode instances after the prompt, as vLLM's engines pull it.
    Without cost when either role is missing."""
    moved = _build_kv_transfer(problem, placement, compute_token_ms=0.0)
    return SimulatedTransfer(moved.latency_ms, moved.token_ms) if moved else SimulatedTransfer()


def compute_ahead_from_tokens(problem: Problem, placement: CandidatePlacement) -> int:
    """Prompt tokens from which a layer-wise transfer beats one after the prompt; 0: never.

    Splitwise, section IV-C. Rounded up to a power of two, so that small changes of the input do not
    change it.
    """
    timing = placement.groups[0].instance.candidate.estimate.timing
    compute_ms = timing.predict_prefill_ms([_PROMPT_TOKENS])
    moved = _build_kv_transfer(problem, placement, compute_ms / _PROMPT_TOKENS)
    min_tokens = moved.overlap_from_tokens if moved else None
    return 1 << (min_tokens - 1).bit_length() if min_tokens else 0


def _build_kv_transfer(
    problem: Problem, placement: CandidatePlacement, compute_token_ms: float
) -> KvTransferModel | None:
    """The transfer from prefill to decode instances; None: either role is missing."""
    sizes = {group.role: group.instance.candidate.parallelism for group in placement.groups}
    if Role.PREFILL not in sizes or Role.DECODE not in sizes:
        return None
    prefill, decode = ((sizes[r].tensor, sizes[r].pipeline) for r in (Role.PREFILL, Role.DECODE))
    link = select_link(placement)
    return build_kv_transfer(problem.shape, link, prefill, decode, compute_token_ms)


def select_link(placement: CandidatePlacement) -> Link:
    """The link for KV: that inside a node when a whole cell is in one, else the slowest network."""
    supplies = list({group.instance.candidate.supply for group in placement.groups})
    first = supplies[0]
    if first.cell_link and is_one_pod(placement):
        return first.cell_link
    is_small = first.num_nodes == 1 or placement.gpus <= first.gpus_per_node
    if len(supplies) == 1 and (placement.is_in_node or is_small):
        return first.node_link
    return reduce(select_slower, [supply.network_link for supply in supplies])


def is_one_pod(placement: CandidatePlacement) -> bool:
    """Whether each cell becomes one pod, whose engines have the GPUs' own link
    (`cleave.manifests.topology.fits_one_pod`)."""
    (first, *others) = {group.instance.candidate.supply for group in placement.groups}
    has_room = placement.gpus // placement.copies <= first.gpus_per_node
    is_whole = placement.is_in_node and not placement.count_replicas(Role.MIXED)
    return not others and first.cell_link is not None and has_room and is_whole


def find_needed_limit(problem: Problem, placement: CandidatePlacement) -> int | None:
    """The tokens of the longest request with which all instances start, where the deployment's
    limit is higher; None: its own."""
    room = min(group.instance.candidate.estimate.max_model_len for group in placement.groups)
    limit = problem.demand.max_model_len
    return room if limit is not None and room < limit else None


def build_kv_link(placement: CandidatePlacement) -> PlannedKvLink | None:
    """The link that `build_transfer` assumes; None: either role is missing.

    Where a decode engine has more GPUs than a prefill engine, several receive from one.
    """
    sizes = {group.role: group.instance.candidate.parallelism for group in placement.groups}
    gpus = {role: size.gpus_per_engine for role, size in sizes.items()}
    if Role.PREFILL not in gpus or Role.DECODE not in gpus:
        return None
    link, share = select_link(placement), min(1.0, gpus[Role.PREFILL] / gpus[Role.DECODE])
    return PlannedKvLink(link.kind, link.effective_gb_per_s * share)


def to_planned_pools(placement: CandidatePlacement) -> tuple[PlannedPool, ...]:
    """The pools of all cells, as listed in a `Plan`."""
    return tuple(
        PlannedPool(
            role=group.role,
            replicas=group.replicas * placement.copies,
            parallelism=group.instance.candidate.parallelism,
            gpu=group.instance.candidate.supply.gpu,
            batching=group.instance.batching.name,
            max_num_seqs=group.instance.max_num_seqs,
            max_num_batched_tokens=group.instance.max_num_batched_tokens,
            per_cell=None
            if group.role is Role.MIXED or not placement.is_in_node
            else group.replicas,
        )
        for group in placement.groups
    )


def describe(placement: CandidatePlacement) -> str:
    """A text such as `2 prefill (TP 2) + 1 decode (TP 1, PP 2)`."""
    return " + ".join(
        f"{group.replicas * placement.copies} {group.role} ({_format_parallelism(group.instance)})"
        for group in placement.groups
    )


def _format_parallelism(instance: PlannedInstance) -> str:
    size = instance.candidate.parallelism
    sizes = (("TP", size.tensor), ("PP", size.pipeline), ("DP", size.data))
    shown = [f"{name} {number}" for name, number in sizes if number > 1 or name == "TP"]
    return ", ".join([*shown, "EP"] if size.expert else shown)


def _build_pools(placement: CandidatePlacement, role: Role) -> tuple[SimulatedPool, ...]:
    return tuple(
        SimulatedPool(g.instance.engine, g.replicas) for g in placement.groups if g.role is role
    )
