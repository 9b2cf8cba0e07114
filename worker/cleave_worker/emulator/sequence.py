"""One request inside the engine: its tokens, its blocks, and how much of it is computed.

Owned by the scheduler. The state that leads to the next token must be the same whether KV was
computed here in chunks, found in the prefix cache, or pulled from another instance.
"""

import hashlib
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from zlib import crc32

from cleave.policy.request_targets import NO_TARGETS, RequestTargets
from cleave_worker.emulator import tokenizer
from cleave_worker.emulator.blocks import EMPTY, BlockPool, extend, fold

_EOS_PERIOD = 256
"""One token in this many ends the text, unless ignore_eos."""


class RemotePrefill(NamedTuple):
    """Location of a prompt's KV (vLLM's kv_transfer_params for a pull)."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    cached_tokens: int | None = None
    """Prompt tokens that the prefill engine had cached; None: not known."""


class PrefixSource(NamedTuple):
    """An engine whose prefix cache may have the beginning of a prompt."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked client request. Lengths in tokens."""

    id: str
    prompt: "array[int]"
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    do_remote_decode: bool = False
    """Lease the blocks after the end to another instance (do_remote_decode)."""
    handoff: RemotePrefill | None = None
    """Pull the prompt's KV instead of computing it (do_remote_prefill)."""
    source: PrefixSource | None = None
    """Pull what it has cached of the prompt and this engine has not."""
    seed: int | None = None
    """Seed of the sampler; None: the model's one continuation."""
    choice: int = 0
    """Number of the choice; each has another continuation."""
    adapter: str = ""
    """LoRA adapter, on which KV and tokens depend."""
    weights: str = ""
    """What the engine has loaded; KV and tokens depend on it as well."""
    cache_salt: str = ""
    """Only requests with the same one share cached prompts."""
    targets: RequestTargets = NO_TARGETS

    @property
    def variant(self) -> str:
        """What makes KV and tokens of a prompt differ: weights and adapter; empty: neither."""
        return f"{self.weights}/{self.adapter}" if self.weights else self.adapter

    @property
    def prompt_digest(self) -> bytes:
        """Equal for equal prompts of one adapter and the same weights, which have the same KV."""
        content = self.prompt.tobytes() + self.variant.encode()
        return hashlib.blake2b(content, digest_size=8).digest()


class SequenceState(Enum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended, as vLLM names it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """Progress of one request."""

    __slots__ = (
        "_content", "_keys", "_num_written", "_start", "_summary", "blocks", "cached_tokens",
        "first_token_at", "handoff", "last_token_at", "num_computed", "num_preemptions", "on_host",
        "prompt_len", "pulled_tokens", "request", "scheduled_at", "source", "state", "submitted_at",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, submitted_at: float = 0.0) -> None:
        self.request = request
        self.tokens = array("I", request.prompt)
        self.prompt_len = len(request.prompt)
        self.handoff = request.handoff
        self.source = request.source if request.handoff is None else None
        """Until its prefix is pulled, or cannot be."""
        self.on_host: list[int] = []
        """Contents of the blocks that are to be copied back from host memory, until they are."""
        self.state = SequenceState.WAITING
        self.num_preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.pulled_tokens = 0
        """Prompt tokens whose KV another instance computed, or that came from host memory."""
        self.submitted_at = submitted_at
        self.scheduled_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._keys: list[bytes] = []
        self._start = crc32(request.variant.encode()) if request.variant else EMPTY
        self.reset()

    def reset(self) -> None:
        """Forget all KV after the blocks were freed."""
        self.blocks: list[int] = []
        self.num_computed = 0
        self._num_written = 0
        self._summary = 0
        self._content = self._start

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens that this instance still has to compute."""
        return 1 if self.handoff else max(0, self.prompt_len - self.num_computed)

    def compute_block_keys(self, count: int, block_size: int) -> list[bytes]:
        """Return keys of the first `count` full blocks; equal keys mean equal prefixes."""
        keys = self._keys
        for start in range(len(keys) * block_size, count * block_size, block_size):
            block = self.tokens[start : start + block_size].tobytes()
            request = self.request
            parent = keys[-1] if keys else (request.variant + request.cache_salt).encode()
            keys.append(hashlib.blake2b(parent + block, digest_size=8).digest())
        return keys[:count]

    def adopt(self, num_tokens: int, pool: BlockPool) -> None:
        """Continue from KV that is in `blocks` and covers `num_tokens`. At least the newest token
        is computed again, because its iteration samples the next token."""
        self._summary, self._content = 0, self._start
        for index, block in enumerate(self.blocks[: -(-num_tokens // pool.block_size)]):
            if index:
                self._summary = fold(self._summary, self._content)
            self._content = pool.contents[block]
        self._num_written = num_tokens
        self.num_computed = min(num_tokens, len(self.tokens) - 1)

    def compute(self, count: int, pool: BlockPool) -> None:
        """Write the KV of the next `count` tokens; `blocks` has room for them."""
        size = pool.block_size
        end = self.num_computed + count
        start = max(self.num_computed, self._num_written)
        while start < end:
            index, offset = divmod(start, size)
            if not offset and index:
                self._summary = fold(self._summary, self._content)
            stop = min(end, start + size - offset)
            self._content = extend(self._content, self.tokens[start:stop])
            pool.contents[self.blocks[index]] = self._content
            start = stop
        self.num_computed = end
        self._num_written = max(self._num_written, end)

    def sample(self) -> tuple[int, FinishReason | None]:
        """Append the token that follows all computed KV; also return the finish reason, if any."""
        request = self.request
        value = fold(fold(self._summary, self._content), len(self.tokens))
        if self._start != EMPTY:
            # KV of the right adapter and weights is not enough: the engine that continues must
            # apply them, too.
            value = fold(value, self._start)
        num_outputs = self.num_outputs + 1
        if request.seed is not None or request.choice:
            # By the number of tokens, so that an engine that continues samples the same ones.
            value = fold(fold(value, (request.seed or 0) + request.choice), num_outputs)
        may_end = not request.ignore_eos and num_outputs > request.min_tokens
        if may_end and (value >> 40) % _EOS_PERIOD == 0:
            self.tokens.append(tokenizer.EOS)
            return tokenizer.EOS, FinishReason.STOP
        token = tokenizer.choose_word(value)
        self.tokens.append(token)
        return token, FinishReason.LENGTH if num_outputs >= request.max_tokens else None
