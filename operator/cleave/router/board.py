"""The scores of the instances that may be paired: one deployment, one revision.

Built by the directory whenever openness changes (rare), updated per dispatch, release and report
(often), read by the router's pick. Unlike revisions sit on unlike boards, so that a prefill of one
can never meet a decode of the other.
"""

import numpy as np

from cleave.policy.dispatch import RECENCY, STALE, Scores
from cleave.router.instance import Contact, Instance
from cleave.rpc.v1.agent_pb2 import ROLE_DECODE, ROLE_MIXED, ROLE_PREFILL


class Board:
    """Scores in tokens; +inf where the instance is closed for a use, empty where all are.

    STALE is added to whatever an instance that is not heard scores: a busy machine starves agents
    long before engines, so it is still better than none, and worse than any other.
    """

    __slots__ = (
        "_uses",
        "decode",
        "instances",
        "mixed",
        "pending_prompt",
        "prefill",
        "spare",
        "whole",
    )

    def __init__(self, instances: list[Instance]) -> None:
        self.instances = instances
        self.prefill = _closed(len(instances))
        """Prompt of a split request: prefill instances with a verified KV path."""
        self.decode = _closed(len(instances))
        """Its decoding: decode and mixed instances with a verified KV path."""
        self.mixed = _closed(len(instances))
        """Whole requests on mixed instances, which are meant for them."""
        self.whole = _closed(len(instances))
        """Whole requests on mixed and decode instances."""
        self.spare = _closed(len(instances))
        """Whole requests on prefill instances, when nothing else is left."""
        self.pending_prompt = np.zeros(len(instances))
        self._uses = [self._find_uses(instance) for instance in instances]
        for slot in range(len(instances)):
            self.update(slot)
        for use in ("prefill", "decode", "mixed", "whole", "spare"):
            if not np.isfinite(getattr(self, use)).any():
                setattr(self, use, _closed(0))

    def _find_uses(self, instance: Instance) -> tuple[tuple[Scores, ...], tuple[Scores, ...]]:
        """(arrays scored by pending prompt tokens, arrays scored by all pending tokens)."""
        if not instance.selectable:
            return (), ()
        verified = instance.registration.kv_path.verified
        role = instance.registration.role
        if role == ROLE_PREFILL:
            return (self.prefill,) if verified else (), (self.spare,)
        decode = (self.decode,) if verified else ()
        if role == ROLE_DECODE:
            return (), (*decode, self.whole)
        if role == ROLE_MIXED:
            return (), (*decode, self.whole, self.mixed)
        return (), ()

    def update(self, slot: int) -> None:
        """Score one instance anew from its books."""
        instance = self.instances[slot]
        ledger = instance.ledger
        prompt = ledger.prompt.pending
        if instance.contact is Contact.STALE:
            prompt += STALE
        self.pending_prompt[slot] = prompt
        by_prompt, by_all = self._uses[slot]
        tie = instance.last_turn * RECENCY
        for scores in by_prompt:
            scores[slot] = prompt + tie
        if by_all:
            total = prompt + ledger.resident.pending + tie
            for scores in by_all:
                scores[slot] = total


def _closed(size: int) -> Scores:
    return np.full(size, np.inf)
