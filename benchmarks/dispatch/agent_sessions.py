"""Generated sessions of agents, whose prompts repeat: the traffic of caches.py and pulls.py.

What is hard: an answer is part of the next prompt, and its KV lies where it was decoded.
"""

import numpy as np
import traces
from numpy.typing import NDArray

from cleave.simulator.trace import AnswerBlocks, PromptBlocks, Trace

SHARED_TOKENS = 8_000
FIRST_TOKENS, RESULT_TOKENS, ANSWER_TOKENS = 1_000, 800, 300
MEAN_TURNS = 20
MAX_TOKENS = 60_000
PAUSE_S, MEAN_TOOL_S, TOKEN_S = 2.0, 15.0, 0.05
BLOCK_TOKENS = 64
"""Sessions of agents: a system prompt with tools that all share, a task, and a number of turns,
each an answer and the result of a tool (geometric; log-normal lengths with these means, sigma 1).
The next turn comes after the pause, the answer's tokens and the tool's exponential time."""


def draw_sessions(requests: int, rate: float, seed: int) -> Trace:
    """`requests` turns at `rate` per second: at other rates there are more or fewer sessions at a
    time, with the same pauses."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int, int]] = []
    session, begin = 0, 0.0
    # A few more, because the latest are cut off.
    while len(rows) < 2 * requests:
        begin += rng.exponential(1000 * MEAN_TURNS / rate)
        at, tokens = begin, SHARED_TOKENS + _draw_length(rng, FIRST_TOKENS)
        for _ in range(rng.geometric(1 / MEAN_TURNS)):
            answer = _draw_length(rng, ANSWER_TOKENS)
            if tokens + answer > MAX_TOKENS:
                break
            rows.append((at, session, tokens, answer))
            at += 1000 * (PAUSE_S + TOKEN_S * answer + rng.exponential(MEAN_TOOL_S))
            tokens += answer + _draw_length(rng, RESULT_TOKENS)
        session += 1
    # Sessions that would have begun before the first are missing: counted is the middle.
    rows = sorted(rows)[requests // 4 : requests // 4 + requests]
    arrival, owner, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    width, shared = MAX_TOKENS // BLOCK_TOKENS + 1, SHARED_TOKENS // BLOCK_TOKENS

    def number(own: int, first: int, end: int) -> NDArray[np.int64]:
        at = np.arange(first, max(end, first))
        return np.where(at < shared, at, shared + own * width + at)

    full, ends = prompt // BLOCK_TOKENS, (prompt + output) // BLOCK_TOKENS
    prompts = [number(own, 0, end) for own, end in zip(owner, full, strict=True)]
    answers = [number(*each) for each in zip(owner, full, ends, strict=True)]
    count = shared + (int(owner.max()) + 1) * width
    blocks = PromptBlocks(
        BLOCK_TOKENS, *join_lists(prompts), count, AnswerBlocks(*join_lists(answers))
    )
    predicted = traces.predict(prompt, output)
    return Trace(arrival - arrival[0], prompt, output, predicted, blocks)


def _draw_length(rng: np.random.Generator, mean: float) -> int:
    return int(max(rng.lognormal(np.log(mean) - 0.5, 1.0), 1))


def join_lists(lists: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each begins in the whole, and the whole."""
    starts = np.concatenate(([0], np.cumsum([len(each) for each in lists])))
    return starts, np.concatenate(lists).astype(np.int64)
