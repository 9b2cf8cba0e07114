"""Retry policy: which instances a request may use after an attempt has failed. Used by the
exchange; no I/O.

What is hard: telling a dead instance from one that merely returned an error. When the decode engine
of a split request returns an error, the KV often could not be pulled, so the instance may still
serve the request as a whole; a lost connection means that the instance is gone.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from cleave.gateway.http.completion_request import Completion, find_text
from cleave.router.router import Pick, Router
from cleave.router.selection import Cached

PREFILL_BUDGET = 2
"""Retries of one request after prefill failures."""
DECODE_BUDGET = 2
"""Retries of one request after decode failures."""
LOSS_BUDGET = 16
"""Engines that one stream may lose, whatever its progress with each."""


class Failure(enum.Enum):
    """How an attempt failed; the values are labels of cleave_gateway_retries."""

    LOST = "lost"
    """Its connection broke."""
    UNREACHED = "unreached"
    """No connection: the engine has not received the request."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """A status of 500 or above, or a stream that begins with an error of the engine's."""
    HANDOFF = "handoff"
    """A handoff that must not be used."""
    STALL = "stall"
    """No more bytes came, nor did they on any other stream of that instance."""


_GONE = (Failure.LOST, Failure.UNREACHED, Failure.STALL)
"""The engine itself failed; with the other failures the handoff may have been the cause."""


@dataclass(slots=True)
class Recovery:
    """The failed attempts of one request."""

    avoid: set[str] = field(default_factory=set)
    """Instances on which an attempt was lost; not used again."""
    doubted: set[str] = field(default_factory=set)
    """Instances that returned an error; used only if no other is left."""
    prefills_lost: int = 0
    decodes_lost: int = 0
    losses: int = 0
    """Engines lost in the middle of the stream."""
    whole: bool = False
    """After failed handoffs: one instance should do both phases if the fallback rule allows it."""
    cached: Cached | None = None
    """The instance that computed the prompt and probably still has its KV."""

    def note_prefill(self, instance: str) -> bool:
        """A prefill failed; False: the budget is used up, though `whole` may still be tried."""
        self.avoid.add(instance)
        self.prefills_lost += 1
        if self.prefills_lost > PREFILL_BUDGET:
            self.whole = True
        return not self.whole

    def note_decode(self, instance: str, failure: Failure, split: bool) -> bool:
        """A decode attempt, or one of both phases, failed; returns whether a retry is within the
        budget.

        A request that no engine received costs no budget: every instance may be tried.
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
        """A prefill instance computed this many tokens before the decode attempt failed."""
        if failure in _GONE:
            self.cached = Cached(boot_id, tokens)

    def renew(self) -> bool:
        """The stream progressed between the last two losses; False: too many engines were lost."""
        self.losses += 1
        self.prefills_lost = self.decodes_lost = 0
        self.whole = False
        return self.losses <= LOSS_BUDGET

    def forgive(self) -> None:
        """Allow excluded instances again, as a last resort: time has passed and they may be
        back."""
        self.doubted |= self.avoid
        self.avoid.clear()


def choose(
    router: Router,
    completion: Completion,
    history: Recovery | None,
    suspects: Collection[str] = (),
    session: bytes | None = None,
) -> Pick:
    """Pick instances for the next attempt; `history` is None at the first. Raises RouterError.

    `suspects`: instances that currently fail other requests.
    """
    model, prompt = completion.model, completion.prompt_tokens
    output, colocated = completion.output_tokens, not completion.splittable
    text = find_text(completion) if router.reads_text else b""
    if history is None:
        return router.pick(
            model, prompt, output, single=colocated, doubt=suspects, session=session, text=text
        )
    lost = history.prefills_lost > 0
    return router.pick(
        model,
        prompt,
        output,
        single=colocated or (history.whole and router.allows_whole(lost)),
        avoid=history.avoid,
        doubt={*history.doubted, *suspects},
        prefill_lost=lost,
        session=session,
        text=text,
        cached=history.cached,
    )
