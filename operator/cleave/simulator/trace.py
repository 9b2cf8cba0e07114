"""A recorded or randomly drawn sequence of requests: the input of a simulation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_BLOCKS_PER_PROMPT = 64
"""Most blocks of a mean prompt, for those who choose their size: on average half of one at the end
of a continued prompt counts as new, 0.8 % of its tokens. Time and memory grow with blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """Which blocks of the prompts of a trace are equal: what prefix caches can find again.

    A block is `block_tokens` tokens of a prompt together with all tokens before them, so equal
    blocks have equal predecessors. It has a number, below the number of different blocks. The last
    block of a prompt may be shorter; a longer prompt never shares it, although engines would find
    its full blocks of KV: up to `block_tokens` - 1 tokens per continued prompt count as new.
    """

    block_tokens: int
    """A multiple of the KV block size of every engine."""
    starts: NDArray[np.int64]
    """By request the index of its first block in `numbers`, and at the end their total."""
    numbers: NDArray[np.int64]
    """Numbers of the blocks of all prompts; a prompt's are consecutive, from its first token on."""
    count: int
    """Number of different blocks, those of answers included."""
    answers: "AnswerBlocks | None" = None
    """None: no prompt contains an earlier answer, as far as is known."""

    @property
    def per_prompt(self) -> float:
        """Mean number of blocks of a prompt."""
        return len(self.numbers) / max(len(self.starts) - 1, 1)

    def select(self, order: NDArray[np.int64], lap: NDArray[np.int64]) -> "PromptBlocks":
        """The blocks of the requests `order`; those of different `lap`s share nothing."""
        starts, own, sources = _select_rows(self.starts, order)
        numbers = self.numbers[sources] + lap[own] * self.count
        laps = int(lap.max()) + 1
        answers = self.answers
        if answers is not None:
            answer_starts, own, sources = _select_rows(answers.starts, order)
            answer_numbers = answers.numbers[sources] + lap[own] * self.count
            answers = AnswerBlocks(answer_starts, answer_numbers)
        return PromptBlocks(self.block_tokens, starts, numbers, self.count * laps, answers)

    def take_first(self, num: int) -> "PromptBlocks":
        """The blocks of the first `num` prompts; the arrays are parts of these."""
        numbers = self.numbers[: self.starts[num]]
        count = int(numbers.max()) + 1 if len(numbers) else 0
        return PromptBlocks(self.block_tokens, self.starts[: num + 1], numbers, count)

    def join(self, factor: int) -> "PromptBlocks":
        """The same prompts in blocks of `factor` times as many tokens. Each is named by its last
        part, which stands for all before it; parts at the end that fill none are dropped."""
        whole = np.diff(self.starts) // factor
        starts = np.concatenate(([0], np.cumsum(whole)))
        own = np.repeat(np.arange(len(whole)), whole)
        at = np.arange(starts[-1]) - starts[own]
        last = self.numbers[self.starts[own] + (at + 1) * factor - 1]
        kept, numbers = np.unique(last, return_inverse=True)
        return PromptBlocks(self.block_tokens * factor, starts, numbers, len(kept))

    def cut(self, prompt_tokens: NDArray[np.int64]) -> "PromptBlocks":
        """The blocks of prompts that are cut to `prompt_tokens`; if any is, without answers."""
        counts = np.diff(self.starts)
        left = np.minimum(counts, -(-prompt_tokens // self.block_tokens))
        if (left == counts).all():
            return self
        starts = np.concatenate(([0], np.cumsum(left)))
        own = np.repeat(np.arange(len(left)), left)
        sources = np.arange(starts[-1]) - starts[own] + self.starts[own]
        return PromptBlocks(self.block_tokens, starts, self.numbers[sources], self.count)

    def count_repeated(self) -> NDArray[np.int64]:
        """By request, its leading blocks that an earlier request has: all that a cache finds."""
        own = self._list_owners()
        first = np.full(self.count, len(self.starts), np.int64)
        # Written from the last use to the first, so that the first one stays.
        first[self.numbers[::-1]] = own[::-1]
        repeated = np.bincount(own, first[self.numbers] < own, len(self.starts) - 1)
        return repeated.astype(np.int64)

    def compute_distance(self, share: float) -> int:
        """Requests between two uses of a block: at most as many in `share` of repetitions; 0 where
        nothing repeats. It is how many requests fill a cache with what later ones find."""
        by_block = np.argsort(self.numbers, kind="stable")
        own, numbers = self._list_owners()[by_block], self.numbers[by_block]
        distances = np.diff(own)[numbers[1:] == numbers[:-1]]
        return int(np.quantile(distances, share)) if len(distances) else 0

    def _list_owners(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBlocks:
    """The blocks that answers fill, which instances that decode cache: prompts that continue them
    have the same. The first of a request begins where the last full block of its prompt ends, so a
    prompt with such blocks has none that is shorter."""

    starts: NDArray[np.int64]
    """By request the index of its first block in `numbers`, and at the end their total."""
    numbers: NDArray[np.int64]
    """As those of `PromptBlocks`."""


def _select_rows(
    starts: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of the rows `order` of lists that begin at `starts`: their starts one after another, and by
    item the row in `order` and its old index."""
    counts = np.diff(starts)[order]
    selected = np.concatenate(([0], np.cumsum(counts)))
    own = np.repeat(np.arange(len(order)), counts)
    return selected, own, np.arange(selected[-1]) - selected[own] + starts[order[own]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; arrays of equal length."""

    arrival_ms: NDArray[np.float64]
    """Since the start of the trace, never decreasing."""
    prompt_tokens: NDArray[np.int64]
    """At least 1 each."""
    output_tokens: NDArray[np.int64]
    """At least 1 each."""
    predicted_tokens: NDArray[np.int64] | None = None
    """Output tokens that dispatch and admission assume; None: the actual ones."""
    blocks: PromptBlocks | None = None
    """Which prompts begin alike; None: no prompt repeats, so that nothing is found in caches."""
    remarks: tuple[str, ...] = ()
    """What was assumed or left out when it was read from a file, one sentence each."""

    def __len__(self) -> int:
        return len(self.arrival_ms)

    @property
    def rate(self) -> float:
        """Mean arrivals in req/s; 0 when all arrive at once."""
        span_ms = float(self.arrival_ms[-1] - self.arrival_ms[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span_ms * 1000 if span_ms else 0.0

    def take_first(self, num: int) -> "Trace":
        """The first `num` requests; the arrays are parts of these."""
        return Trace(
            self.arrival_ms[:num],
            self.prompt_tokens[:num],
            self.output_tokens[:num],
            None if self.predicted_tokens is None else self.predicted_tokens[:num],
            self.blocks and self.blocks.take_first(num),
        )

    def bound_cached_tokens(self) -> NDArray[np.int64]:
        """By request, the most prompt tokens that one cache without limit, shared by all instances,
        could have. The last token of a prompt is always computed."""
        if self.blocks is None:
            return np.zeros(len(self), np.int64)
        found = self.blocks.count_repeated() * self.blocks.block_tokens
        return np.minimum(found, self.prompt_tokens - 1)
