"""Requests of Azure's conversation service, cut or scaled to a model, with Poisson arrivals."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cleave.policy.output_length import ConditionalMean
from cleave.router.router import UNKNOWN_OUTPUT_TOKENS
from cleave.simulator.trace import Trace
from cleave.traffic import history
from cleave.traffic.conversations import Conversations

FILE = "AzureLLMInferenceTrace_2023_conv.csv"
"""Of Azure/AzurePublicDataset (CC-BY-4.0; described in Splitwise, ISCA 2024)."""

CONVERSATIONS = Conversations(turns=5.0, interval_requests=40.0, new_tokens=64, shared_tokens=512)
"""Turns of a conversation are 40 requests apart on average at every rate."""

DITHER_MS = 20.0
"""About a decode pass: half of the first tokens that clients saw lie so far apart from the
simulated ones."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of lengths to draw from."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    conversations: Conversations | None = None
    """Whose turns the requests are; None: no prompt repeats."""
    block_tokens: int = 1
    """Blocks of these prompts are multiples of the engines'."""


def read_lengths(folder: Path, scale: float, max_model_len: int) -> Lengths:
    """The trace's lengths times `scale`; requests that are still too long are left out."""
    recorded = history.read_trace(folder / FILE)
    prompt = np.maximum(1, np.rint(recorded.prompt_tokens * scale)).astype(np.int64)
    # Two tokens at least: a request without a second one has no time per output token.
    output = np.maximum(2, np.rint(recorded.output_tokens * scale)).astype(np.int64)
    fits = prompt + output <= max_model_len
    return Lengths(prompt[fits], output[fits])


def draw_trace(lengths: Lengths, rate: float, num: int, seed: int) -> Trace:
    """`num` requests at `rate` per second; with one seed the same requests at every rate."""
    rng = np.random.default_rng(seed)
    if lengths.conversations is None:
        chosen, blocks = rng.integers(len(lengths.prompt_tokens), size=num), None
    else:
        turns = lengths.conversations.draw_turns(num, seed)
        drawn = rng.integers(len(lengths.prompt_tokens), size=len(turns.owner))
        drawn = drawn[turns.sort_by(lengths.prompt_tokens[drawn])]
        size = lengths.conversations.choose_block_tokens(float(lengths.prompt_tokens.mean()))
        size = max(size, lengths.block_tokens)
        blocks = lengths.conversations.build_blocks(turns, lengths.prompt_tokens[drawn], size)
        chosen = drawn[turns.order]
    gaps_ms = rng.exponential(1000.0, size=num) / rate
    return Trace(
        np.cumsum(gaps_ms) - gaps_ms[0],
        lengths.prompt_tokens[chosen],
        lengths.output_tokens[chosen],
        blocks=blocks,
    )


def dither(trace: Trace, draws: int, seed: int) -> Iterator[Trace]:
    """The same requests, each up to DITHER_MS later, in their order; `draws` times.

    A fleet has many fates with one trace: where passes stand when a request comes is known to a
    few milliseconds, and two instances that are alike to dispatch are not to the request.
    """
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        late_ms = rng.uniform(0.0, DITHER_MS, len(trace))
        yield replace(trace, arrival_ms=np.sort(trace.arrival_ms + late_ms))


def foresee(trace: Trace, lengths: Lengths) -> Trace:
    """With the outputs that a gateway expects which has learnt from such requests.

    Among instances that do both phases it picks by them; it does not know the real ones.
    """
    mean = ConditionalMean(UNKNOWN_OUTPUT_TOKENS)
    for pair in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True):
        mean.observe(*map(int, pair))
    token_counts = zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    # Each asks for exactly as many tokens as it gets.
    predicted = [mean.predict(int(prompt), int(limit)) for prompt, limit in token_counts]
    return replace(trace, predicted_tokens=np.rint(predicted).astype(np.int64))


def all_at_once(lengths: Lengths, num: int, seed: int) -> Trace:
    """The same requests, all waiting at 0 ms."""
    trace = draw_trace(lengths, 1.0, num, seed)
    return replace(trace, arrival_ms=np.zeros(num))
