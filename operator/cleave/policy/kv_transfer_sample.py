"""What one handoff proves about the KV path between two engines. Pure.

Called by the agent's self-test, once for each start of an engine, and by the gateway's witness,
again and again. Right tokens alone prove nothing where a decode engine recomputes lost KV, so the
decode engine must also have counted bytes, in proportion to the blocks of the handoff.
"""

import random
import string
from dataclasses import dataclass

from cleave.rpc.pull_counters import PullCounters

MIN_BYTES_RATIO = 0.9
"""Least bytes per block of one handoff, relative to another one."""


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One handoff with the right tokens, and the decode engine's counters before and after."""

    num_tokens: int
    """Tokens of the prompt."""
    num_blocks: int
    """KV blocks that the handoff names, over all KV cache groups; 0: it names none."""
    prefill_ms: float
    first_token_ms: float
    """From the decode request to its first token, including the transfer."""
    before: PullCounters
    after: PullCounters
    caveat: str = ""
    """What the test could not check; empty: nothing."""

    @property
    def num_bytes(self) -> float:
        """Bytes that the decode engine pulled, including those of other handoffs."""
        return self.after.num_bytes - self.before.num_bytes

    @property
    def seconds(self) -> float:
        """Duration of these pulls, summed over ranks and handoffs."""
        return self.after.seconds - self.before.seconds

    @property
    def bytes_per_s(self) -> float:
        """Mean over ranks and handoffs; 0 when the engine counts no time."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_isolated(self) -> bool:
        """Whether the decode engine received no other handoff during the sample."""
        return self.after.num_tokens - self.before.num_tokens <= self.num_tokens

    @property
    def block_bytes(self) -> float:
        """Bytes per block of the handoff."""
        return self.num_bytes / max(1, self.num_blocks)

    @property
    def num_failed(self) -> float:
        """Failures that the engine counted during the sample, including those of other handoffs."""
        return self.after.num_failed - self.before.num_failed

    def describe(self) -> str:
        """Return bytes, tokens, time and rate as text."""
        rate = f", {self.bytes_per_s / 1e9:.3g} GB/s" if self.bytes_per_s else ""
        others = "" if self.is_isolated else ", including other handoffs"
        return (
            f"{self.num_bytes / 1e6:,.2f} MB for {self.num_tokens:,} tokens "
            f"in {self.seconds:.3g} s{rate}{others}{self.caveat and f', {self.caveat}'}"
        )


def find_fault(short: TransferSample, long: TransferSample) -> str:
    """Return what is wrong with the bytes of two handoffs with the right tokens; empty: nothing."""
    for sample in (short, long):
        if sample.num_bytes <= 0:
            return f"pulled no byte of the KV of {sample.num_tokens:,} prompt tokens"
    if short.is_isolated and long.is_isolated and not is_proportional(short, long):
        return (
            f"pulled {long.num_bytes:,.0f} bytes of the KV of {long.num_tokens:,} prompt tokens, "
            f"too few beside {short.num_bytes:,.0f} bytes of {short.num_tokens:,} tokens"
        )
    return ""


def is_proportional(short: TransferSample, long: TransferSample) -> bool:
    """Return whether both prompts were pulled with about as many bytes per block."""
    least = MIN_BYTES_RATIO * short.num_bytes * long.num_blocks
    return long.num_bytes * short.num_blocks >= least


def make_random_prompt(random_words: random.Random, characters: int) -> str:
    """Return new random words, at most `characters` long."""
    words: list[str] = []
    length = 0
    while length < characters:
        letters = random_words.choices(string.ascii_lowercase, k=random_words.randint(3, 8))
        words.append("".join(letters))
        length += len(letters) + 1
    return " ".join(words)[:characters]
