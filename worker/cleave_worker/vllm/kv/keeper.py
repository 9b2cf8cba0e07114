"""Which blocks of which streams are kept as checkpoints, and which are restored.

The scheduler's half, between steps. What is hard: a block may be copied only when its last token's
KV is written and known. Steps run in the order in which they are scheduled, so what earlier steps
were to compute is written before a later one begins; tokens that are not known yet wait.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.v1.request import Request, RequestStatus

MOST_PER_STEP = 16
"""Blocks copied in one step, all streams together, so that no step takes much longer."""


class Shelf(Protocol):
    """Where checkpoints are."""

    def has(self, key: str) -> bool:
        """Whether a block is there."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Own blocks to fill, with the keys of what belongs there."""

    keys: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass
class KeepOrders:
    """What a rank is to do with one step."""

    save: dict[str, int] = field(default_factory=dict)
    """Blocks by key."""
    restore: dict[str, Restore] = field(default_factory=dict)
    """By request id."""
    drop: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    request: Request
    chain: "Chain"
    saved: list[str] = field(default_factory=list)


class Chain:
    """Keys of the blocks of one request, each over all tokens up to its end."""

    def __init__(self, identity: str, request: Request, block_size: int) -> None:
        self._digest = hashlib.blake2b(f"{identity}|{_kind(request)}|".encode(), digest_size=32)
        self._tokens: Sequence[int] = request.all_token_ids
        self._block_size = block_size
        self._keys: list[str] = []

    def key(self, block: int) -> str:
        """Of a block whose tokens are all known."""
        while len(self._keys) <= block:
            start = len(self._keys) * self._block_size
            tokens = [self._tokens[at] for at in range(start, start + self._block_size)]
            self._digest.update(array("q", tokens).tobytes())
            self._keys.append(self._digest.copy().hexdigest())
        return self._keys[block]


class Keeper:
    """One engine's."""

    def __init__(self, identity: str, block_size: int, shelf: Shelf) -> None:
        """`identity`: model, types and parallelism, as far as the scheduler knows them."""
        self._identity = identity
        self._block_size = block_size
        self._shelf = shelf
        self._streams: dict[str, _Stream] = {}
        self._uses: Counter[str] = Counter()
        """Streams by key: many begin alike."""
        self._wanted: dict[str, tuple[int, tuple[str, ...]]] = {}
        """First block and keys."""
        self._tried: set[str] = set()
        self._orders = KeepOrders()

    def tokens_to_restore(self, request: Request, num_computed_tokens: int) -> int:
        """Beyond those that are computed; the last token is left, as it makes the next one."""
        self._wanted.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if (
            request.prompt_token_ids is None
            or request.request_id in self._tried
            or params.get("do_remote_prefill")
        ):
            return 0
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        chain = Chain(self._identity, request, self._block_size)
        found = []
        for block in range(first, last):
            key = chain.key(block)
            if not self._shelf.has(key):
                break
            found.append(key)
        if found:
            self._wanted[request.request_id] = first, tuple(found)
        return len(found) * self._block_size

    def allocated(self, request: Request, blocks: Sequence[Any], num_external_tokens: int) -> None:
        """A request has blocks; `num_external_tokens` of them are to be filled from elsewhere."""
        first, keys = self._wanted.pop(request.request_id, (0, ()))
        if keys and num_external_tokens:
            self._tried.add(request.request_id)
            keys = keys[: num_external_tokens // self._block_size]
            own = tuple(block.block_id for block in blocks[first : first + len(keys)])
            self._orders.restore[request.request_id] = Restore(keys, own)
        params = request.kv_transfer_params or {}
        if request.prompt_token_ids is not None and not params.get("do_remote_decode"):
            chain = Chain(self._identity, request, self._block_size)
            self._streams.setdefault(request.request_id, _Stream(request, chain))

    def finished(self, request: Request) -> None:
        """Nobody will go on with it."""
        self._wanted.pop(request.request_id, None)
        self._tried.discard(request.request_id)
        stream = self._streams.pop(request.request_id, None)
        if stream is not None:
            self._uses.subtract(stream.saved)
            unused = [key for key in stream.saved if not self._uses[key]]
            self._orders.drop += unused
            for key in unused:
                del self._uses[key]

    def take_orders(self, block_ids: "BlockIds") -> KeepOrders:
        """For the step that is scheduled now, before its tokens are counted as computed."""
        orders, self._orders = self._orders, KeepOrders()
        for key, block in self._ripe(block_ids):
            if len(orders.save) == MOST_PER_STEP:
                break
            orders.save[key] = block
        return orders

    def _ripe(self, block_ids: "BlockIds") -> Iterator[tuple[str, int]]:
        for request_id, stream in self._streams.items():
            request, saved = stream.request, stream.saved
            if request.status is not RequestStatus.RUNNING:
                continue
            known = min(request.num_computed_tokens, request.num_tokens)
            if known // self._block_size <= len(saved):
                continue
            blocks = block_ids(request_id)
            for block in range(len(saved), known // self._block_size):
                key = stream.chain.key(block)
                yield key, blocks[block]
                saved.append(key)
                self._uses[key] += 1


class BlockIds(Protocol):
    """The engine's memory."""

    def __call__(self, request_id: str) -> Sequence[int]:
        """Of a request, in the order of its tokens."""


def _kind(request: Request) -> str:
    """What decides the KV beside tokens, as vLLM's prefix cache sees it."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = ",".join(
        f"{one.identifier}@{one.mm_position.offset}" for one in request.mm_features or ()
    )
    return f"{adapter}|{request.cache_salt or ''}|{media}"
