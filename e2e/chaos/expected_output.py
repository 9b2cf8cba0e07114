"""What an emulated fleet has to answer, computed here: no engine, no gateway, no time.

The emulated tokens are a function of the prompt's KV, so one sequence computed by itself gives
every token that any instance may give, after any handoff, loss or restart on the way.
"""

from dataclasses import dataclass, replace
from typing import Any

from cleave_worker.emulator import tokenizer
from cleave_worker.emulator.api import StopMatcher
from cleave_worker.emulator.api_requests import parse_call
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.sequence import EngineRequest, FinishReason, Sequence

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
ADAPTERS = ("sql", "law")


@dataclass(frozen=True)
class Expected:
    """The right answer to a request."""

    texts: tuple[str, ...]
    """By choice."""
    finishes: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


def expect(path: str, body: dict[str, Any], base: str, weights: str = "") -> Expected:
    """The answer to a request for the base model or an adapter of it; `weights`: what engines have
    loaded."""
    call = parse_call(body, path == CHAT, (base, *ADAPTERS), MAX_MODEL_LEN, {})
    requests = (replace(request, weights=weights) for request in call.requests)
    generated = [_generate(request, call.stop) for request in requests]
    return Expected(
        texts=tuple(text for text, _, _ in generated),
        finishes=tuple(finish.value for _, finish, _ in generated),
        prompt_tokens=len(call.request.prompt),
        completion_tokens=sum(tokens for _, _, tokens in generated),
    )


def _generate(request: EngineRequest, stop: tuple[str, ...]) -> tuple[str, FinishReason, int]:
    """(text, why it ends, tokens) of one choice."""
    longest = len(request.prompt) + request.max_tokens
    pool = BlockPool(longest // BLOCK_SIZE + 1, BLOCK_SIZE)
    sequence, stops, text = Sequence(request), StopMatcher(stop), ""
    sequence.blocks = pool.allocate(pool.num_blocks)
    sequence.compute(len(request.prompt), pool)
    while True:
        token, finish = sequence.sample()
        piece, found = stops.feed(tokenizer.decode(token), finish is not None)
        text += piece
        if found is not None:
            finish = FinishReason.STOP
        if finish is not None:
            return text, finish, sequence.num_outputs
        sequence.compute(1, pool)
