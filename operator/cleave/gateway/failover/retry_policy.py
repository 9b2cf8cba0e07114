"""Retry policy: which instances a request may use after a failed attempt. No I/O.

What is hard: telling a dead instance from one that merely returned an error. When the decode engine
of a split request returns an error, the KV often could not be pulled, so the instance may still
serve the request as a whole; a lost connection means that the instance is gone.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from cleave.gateway.http.completion_request import (
    CompletionRequest,
    get_cache_salt,
    get_prompt_text,
)
from cleave.router.router import Pick, Router
from cleave.router.routing_request import CachedPrompt

PREFILL_BUDGET = 2
"""Retries of one request after prefill failures."""
DECODE_BUDGET = 2
"""Retries of one request after decode failures."""
STREAM_LOSS_BUDGET = 16
"""Engines that one stream may lose, whatever its progress with each."""


class Failure(enum.Enum):
    """How an attempt failed; the values are labels of cleave_gateway_retries."""

    LOST = "lost"
    """Its connection broke."""
    UNREACHED = "unreached"
    """No connection: the engine has not received the request."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """A status of 500 or above, a stream that begins with an error of the engine's, or what is no
    answer, such as a redirect or a page."""
    HANDOFF = "handoff"
    """A handoff that must not be used."""
    STALL = "stall"
    """No more bytes came, nor did they on any other stream of that instance."""
    ADAPTER = "adapter"
    """The engine has unloaded the request's adapter in the meantime."""
    TOO_LONG = "too_long"
    """A response that is larger than the gateway buffers, or that a working engine needs more time
    for than it may take; every engine would send the same."""


_ENGINE_LOST = (Failure.LOST, Failure.UNREACHED, Failure.STALL)
"""The engine itself failed; with the other failures the handoff may have been the cause."""


@dataclass(slots=True)
class FailureHistory:
    """The failed attempts of one request."""

    excluded: set[str] = field(default_factory=set)
    """Instances on which an attempt was lost; not used again."""
    suspects: set[str] = field(default_factory=set)
    """Instances that returned an error; used only if no other is left."""
    num_prefill_failures: int = 0
    num_decode_failures: int = 0
    num_stream_losses: int = 0
    """Engines lost in the middle of the stream."""
    prefers_colocated: bool = False
    """After failed handoffs: one instance should do both phases if the fallback rule allows it."""
    cached: CachedPrompt | None = None
    """The instance that computed the prompt and probably still has its KV."""

    def record_prefill_failure(self, instance: str) -> bool:
        """A prefill failed; False: the budget is used up, but `prefers_colocated` may be tried."""
        self.excluded.add(instance)
        self.num_prefill_failures += 1
        if self.num_prefill_failures > PREFILL_BUDGET:
            self.prefers_colocated = True
        return not self.prefers_colocated

    def record_decode_failure(self, instance: str, failure: Failure, disaggregated: bool) -> bool:
        """A decode attempt, or one of both phases, failed; returns whether the budget has a retry.
        A request that no engine received or knew the adapter of costs no budget: every instance may
        be tried."""
        if failure in (Failure.UNREACHED, Failure.ADAPTER):
            self.excluded.add(instance)
            return True
        self.num_decode_failures += 1
        if failure is Failure.STATUS:
            self.suspects.add(instance)
            self.prefers_colocated = self.prefers_colocated or disaggregated
        else:
            self.excluded.add(instance)
        return self.num_decode_failures <= DECODE_BUDGET

    def extend_to_ranks(self, ranks: Collection[str]) -> None:
        """Treat all data-parallel ranks of an instance as the one that failed: their engines end
        together, the others a moment later."""
        for failed in (self.excluded, self.suspects):
            if not failed.isdisjoint(ranks):
                failed.update(ranks)

    def record_cached_prompt(self, boot_id: str, tokens: int, failure: Failure) -> None:
        """A prefill instance computed this many tokens before the decode attempt failed."""
        if failure in _ENGINE_LOST:
            self.cached = CachedPrompt(boot_id, tokens)

    def reset_budget(self) -> bool:
        """The stream progressed between the last two losses; False: too many engines were lost."""
        self.num_stream_losses += 1
        self.num_prefill_failures = self.num_decode_failures = 0
        self.prefers_colocated = False
        return self.num_stream_losses <= STREAM_LOSS_BUDGET

    def clear_exclusions(self) -> None:
        """Allow excluded instances again, as a last resort: by now they may be back."""
        self.suspects |= self.excluded
        self.excluded.clear()


def pick_instances(
    router: Router,
    completion: CompletionRequest,
    history: FailureHistory | None,
    suspects: Collection[str] = (),
    session: bytes | None = None,
    *,
    is_confined: bool = False,
    closed: Collection[str] = (),
) -> Pick:
    """Pick instances for the next attempt; `history` is None at the first. Raises RouterError.
    `suspects`: instances that currently fail other requests; `is_confined`: the request runs as a
    whole, on none of the instances `closed`."""
    model, prompt = completion.model, completion.prompt_tokens
    output, colocated = completion.output_tokens, is_confined or not completion.can_disaggregate
    text: bytes | memoryview = b""
    salt = b""
    if router.uses_prompt_text:
        text, salt = get_prompt_text(completion), get_cache_salt(completion)
    if history is None:
        return router.pick(
            model,
            prompt,
            output,
            colocated=colocated,
            excluded=closed,
            suspect=suspects,
            session=session,
            text=text,
            salt=salt,
        )
    lost = history.num_prefill_failures > 0
    return router.pick(
        model,
        prompt,
        output,
        colocated=colocated or (history.prefers_colocated and router.allows_colocated(lost)),
        excluded={*history.excluded, *closed} if closed else history.excluded,
        suspect={*history.suspects, *suspects},
        prefill_lost=lost,
        session=session,
        text=text,
        salt=salt,
        cached=history.cached,
    )
