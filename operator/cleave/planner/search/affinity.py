"""Chooses the placement algorithm by the network: may KV leave its node?

DistServe, sections 3.3 and 4: over a fast network KV transfers cost next to nothing (Algorithm 1);
over a slow one they should stay in the node, and the search has to include their cost (Algorithm
2). The link inside a node is given by the supply; between pods it is the network again, and on one
node as well, except inside a cell, which is one pod.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.api.planning import Affinity
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.planner.search.candidates import Candidate, build_prefill
from cleave.planner.search.capacity_bound import compute_prefill_rate
from cleave.planner.search.context import SearchContext

SHARE_OF_TTFT = 0.1
"""Largest share of the TTFT target that the KV transfer of a mean prompt may take ..."""
_SHARE_OF_LINK = 0.5
"""... and largest utilization of a busy prefill instance's link by all its KV transfers."""


@dataclass(frozen=True, slots=True)
class AffinityChoice:
    """High or low affinity, and the reason."""

    affinity: Affinity
    reason: str


def choose_affinity(search: SearchContext, candidates: Sequence[Candidate]) -> AffinityChoice:
    """The requested affinity; with Auto, the one that the network between nodes allows."""
    problem = search.problem
    requested = problem.planning.affinity
    if requested is not Affinity.AUTO:
        return AffinityChoice(requested, f"{requested.value} affinity as requested")
    (first, *others) = problem.supplies
    if first.num_nodes == 1 and not others and first.cell_link is None:
        return AffinityChoice(Affinity.HIGH, "one node: no KV leaves it")
    candidate = min(candidates, key=lambda each: each.gpus)
    lengths = search.trials.get_lengths()
    size = candidate.parallelism.tensor, candidate.parallelism.pipeline
    moved = build_kv_transfer(problem.shape, candidate.supply.network_link, size, size, 0.0)
    handoff_ms = moved.compute_serialized_ms(lengths.prompt_tokens)
    prompts = compute_prefill_rate(build_prefill(problem, candidate).engine, lengths)
    of_ttft, of_link = handoff_ms / problem.slo.ttft_ms, prompts * handoff_ms / 1000
    is_fast = of_ttft <= SHARE_OF_TTFT and of_link <= _SHARE_OF_LINK
    takes = (
        f"{handoff_ms:.3g} ms, {of_ttft:.1%} of the TTFT target ({SHARE_OF_TTFT:.0%} at most), and "
        f"{min(of_link, 9.99):.0%} of a busy instance's link ({_SHARE_OF_LINK:.0%} at most)"
    )
    if is_fast:
        reason = f"KV may leave its node: over the network that of a mean prompt takes {takes}"
        return AffinityChoice(Affinity.HIGH, reason)
    reason = f"KV stays inside a node: over the network that of a mean prompt would take {takes}"
    if link := first.cell_link:
        seen = f"{link.effective_gb_per_s:.3g} GB/s ({link.kind})"
        reason = f"{reason}; inside a cell that is one pod it moves at {seen}, as was seen there"
    return AffinityChoice(Affinity.LOW, reason)
