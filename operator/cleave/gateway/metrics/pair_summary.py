"""What canary handoffs have shown, summed up by decode instance. Pure.

Called for a gateway's `/fleet` and `/metrics`, in any of its processes: all of them receive the
same results from the agents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.router.instance import RoutedInstance
from cleave.router.pair_proofs import PairResult
from cleave.router.score_table import ScoreTable, list_uses
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import Steps

_CLOSING = (agent_pb2.TRUST_SUSPECT, agent_pb2.TRUST_FAILED)


@dataclass(frozen=True, slots=True)
class PairSummary:
    """The pairs of one decode instance with all prefill instances of its revision."""

    total: int
    proven: tuple[PairResult, ...]
    closed: tuple[PairResult, ...]
    """Of pairs that are suspect or have failed."""

    def get_oldest_age_s(self, now: float) -> float:
        """Seconds since the handoff that is the oldest proof; 0: nothing is proven."""
        return max((now - each.at for each in self.proven), default=0.0)

    def find_slowest(self) -> PairResult | None:
        """The slowest of the proven pairs; None: no rate is known."""
        measured = [each for each in self.proven if each.bytes_per_s > 0]
        return min(measured, key=lambda each: each.bytes_per_s, default=None)


def find_partners(table: ScoreTable) -> Steps[tuple[list[str], list[RoutedInstance]]]:
    """(boots of the instances of a table that prefill for others, those that decode for them)."""
    prefills: list[str] = []
    decodes: list[RoutedInstance] = []
    for instance in table.instances:
        uses = list_uses(instance)
        if "prefill" in uses:
            prefills.append(instance.target.boot_id)
        if "decode" in uses:
            decodes.append(instance)
        yield
    return prefills, decodes if prefills else []


def summarize_pairs(prefills: Sequence[str], decode: RoutedInstance) -> PairSummary:
    """The pairs of a decode instance with all that prefill; arguments from `find_partners`."""
    results = [decode.pairs[boot] for boot in prefills if boot in decode.pairs]
    proven = [each for each in results if each.trust == agent_pb2.TRUST_PROVEN]
    closed = [each for each in results if each.trust in _CLOSING]
    return PairSummary(len(prefills), tuple(proven), tuple(closed))
