"""What to do when an engine lets a request down. Asked by the exchange; no I/O.

What is hard: telling a dead instance from one that merely refused. A refusal of a split request
by the decode side often means that the KV could not be pulled, so that instance may still be right
for the request as a whole; a lost connection says it is gone.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from cleave.gateway.completion import Completion, find_text
from cleave.router.chooser import Cached
from cleave.router.router import Pick, Router

PREFILL_BUDGET = 2
"""Further prefill attempts of one request."""
DECODE_BUDGET = 2
"""Further attempts after decode failures."""
LOSS_BUDGET = 16
"""Engines that one stream may outlive, however far it got with each."""


class Failure(enum.Enum):
    """How an engine let a request down."""

    LOST = "lost"
    """Its connection broke."""
    UNREACHED = "unreached"
    """No connection: no engine has seen the request."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """An answer of the 5xx kind, or a stream that begins with such an error."""
    HANDOFF = "handoff"
    """A hand-off that must not be used."""
    STALL = "stall"
    """Nothing more came, from an instance that gave nobody anything."""


_GONE = (Failure.LOST, Failure.UNREACHED, Failure.STALL)
"""The engine's own undoing; with the others the hand-off may have been to blame."""


@dataclass(slots=True)
class Recovery:
    """What a request has been through."""

    avoid: set[str] = field(default_factory=set)
    """Instances that it was lost on."""
    doubted: set[str] = field(default_factory=set)
    """Instances that answered with an error; they may be asked again if nothing else is left."""
    prefills_lost: int = 0
    decodes_lost: int = 0
    losses: int = 0
    """Engines lost in the middle of its stream."""
    whole: bool = False
    """Hand-offs have failed it: one instance shall do both phases if the fallback allows."""
    cached: Cached | None = None
    """Who computed its prompt, and probably has it still."""

    def note_prefill(self, instance: str) -> bool:
        """A prefill attempt failed; whether another is left. If not, `whole` may still be."""
        self.avoid.add(instance)
        self.prefills_lost += 1
        if self.prefills_lost > PREFILL_BUDGET:
            self.whole = True
        return not self.whole

    def note_decode(self, instance: str, failure: Failure, split: bool) -> bool:
        """A decode attempt, or one of both phases, failed; whether another is left.

        What no engine has seen cannot have been its undoing: as many are tried as there are.
        """
        if failure is Failure.UNREACHED:
            self.avoid.add(instance)
            return True
        self.decodes_lost += 1
        if failure is Failure.STATUS:
            self.doubted.add(instance)
            self.whole = self.whole or split
        else:
            self.avoid.add(instance)
        return self.decodes_lost <= DECODE_BUDGET

    def note_prompt(self, boot_id: str, tokens: int, failure: Failure) -> None:
        """A prefill instance has computed so much for it, and its decode attempt failed then."""
        if failure in _GONE:
            self.cached = Cached(boot_id, tokens)

    def renew(self) -> bool:
        """The stream got on between this loss and the one before; whether it may go on again."""
        self.losses += 1
        self.prefills_lost = self.decodes_lost = 0
        self.whole = False
        return self.losses <= LOSS_BUDGET

    def forgive(self) -> None:
        """Nothing else is left, and some time has passed: what was lost may have come back."""
        self.doubted |= self.avoid
        self.avoid.clear()


def choose(
    router: Router,
    completion: Completion,
    past: Recovery | None,
    doubt: Collection[str] = (),
    session: bytes | None = None,
) -> Pick:
    """Instances for the next attempt; `past` is None at the first. Raises RouterError.

    `doubt`: instances that fail others just now.
    """
    model, prompt = completion.model, completion.prompt_tokens
    output, single = completion.output_tokens, not completion.splittable
    text = find_text(completion) if router.reads_text else b""
    if past is None:
        return router.pick(
            model, prompt, output, single=single, doubt=doubt, session=session, text=text
        )
    lost = past.prefills_lost > 0
    return router.pick(
        model,
        prompt,
        output,
        single=single or (past.whole and router.allows_whole(lost)),
        avoid=past.avoid,
        doubt={*past.doubted, *doubt},
        prefill_lost=lost,
        session=session,
        text=text,
        cached=past.cached,
    )
