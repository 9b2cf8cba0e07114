"""What canary handoffs have shown about pairs of a prefill and a decode engine. Pure.

The decode side's agent keeps the results of the gateways' witness and sends them to every router,
so that all processes of all gateways close the same pairs and none forgets them when it restarts.
Used by the registry. What is hard: no pair may stay closed when it is not tested any more, so
results expire; they belong to boots, so that a restarted engine begins without any; and they
travel, so that an older one may arrive after a newer one, which it must not replace.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cleave.policy.pair_trust import ResultOrder
from cleave.rpc.v1 import agent_pb2

_EXPIRY_S: Mapping[int, float] = {agent_pb2.TRUST_SUSPECT: 60.0, agent_pb2.TRUST_FAILED: 600.0}
"""How long a result closes its pair. Failed pairs are tested at least once a minute."""
_UNKNOWN_S = 10.0
"""How long a result counts here that its agent does not know: it is under way, or lost."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """The newest result of a pair."""

    prefill: str
    """Instance."""
    trust: int
    """A number of agent_pb2.Trust; newer versions may send others."""
    at: float
    """Time of the handoff, in seconds of the registry's clock."""
    bytes_per_s: float = 0.0
    """To one GPU; 0: not measured."""
    pull_ms: float = 0.0
    reason: str = ""
    """What was wrong; empty when proven."""
    source: str = ""
    sequence: int = 0
    """Of the results of its source."""

    @property
    def order(self) -> ResultOrder:
        """Compares it with other results of its pair."""
        return ResultOrder(self.source, self.sequence, self.at)

    @property
    def closed_until(self) -> float:
        """Until when the pair must not be picked; -inf: it may be."""
        expiry_s = _EXPIRY_S.get(self.trust)
        return self.at + expiry_s if expiry_s is not None else -math.inf

    def is_closed(self, now: float) -> bool:
        """Whether the pair must not be picked."""
        return now < self.closed_until


def read_proofs(proofs: agent_pb2.PairProofs, now: float) -> dict[str, PairResult]:
    """Results by the boot of the prefill engine; `now`: seconds of the registry's clock."""
    return {
        each.prefill_boot_id: PairResult(
            each.prefill,
            each.trust,
            now - each.age_ms / 1000,
            each.bytes_per_s,
            each.pull_ms,
            each.reason,
            each.source,
            each.sequence,
        )
        for each in proofs.proofs
    }


def merge_results(
    known: Mapping[str, PairResult], sent: Mapping[str, PairResult], now: float
) -> dict[str, PairResult]:
    """The newest results of each pair, of those that are `known` and all that the agent has `sent`.
    It does not know newer ones of this process yet."""
    newer = {
        boot_id: result
        for boot_id, result in known.items()
        if (
            sent[boot_id].order.is_before(result.order)
            if boot_id in sent
            else now - result.at < _UNKNOWN_S
        )
    }
    return {**sent, **newer}
