"""Decides which blocks of running requests are checkpointed, and which are restored.

The scheduler side, between steps. A block may be copied only when the KV of its last token is
written, and its key needs all of its tokens. Steps run in the order in which they are scheduled, so
blocks of earlier steps are written before a later step begins. With asynchronous scheduling sampled
tokens may still be unknown; their blocks wait.
"""

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request, RequestStatus

from cleave_worker.vllm.kv.scheduler_side import build_extra_keys

MAX_BLOCKS_PER_STEP = 16
"""Blocks copied per step over all requests, so that no step takes much longer."""
BlockIdLookup = Callable[[str], Sequence[int]]
"""Returns a request's blocks in the engine's block table, in the order of the tokens."""


@dataclass(frozen=True, slots=True)
class BlockRestore:
    """Local blocks to fill, with the keys of their contents."""

    keys: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass
class CheckpointMetadata:
    """Tasks of a rank in one step."""

    save: dict[str, int] = field(default_factory=dict)
    """Block numbers by key."""
    restore: dict[str, BlockRestore] = field(default_factory=dict)
    """By request id."""
    drop: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _CheckpointedRequest:
    request: Request
    hash_chain: "PrefixHashChain"
    saved_keys: list[str] = field(default_factory=list)


class PrefixHashChain:
    """Keys of the blocks of one request, each a hash over all tokens up to its end."""

    def __init__(self, identity: str, request: Request, block_size: int) -> None:
        seed = f"{identity}|{build_extra_keys(request)}|"
        self._digest = hashlib.blake2b(seed.encode(), digest_size=32)
        self._tokens: Sequence[int] = request.all_token_ids
        self._block_size = block_size
        self._keys: list[str] = []

    def get_key(self, block: int) -> str:
        """Return the key of a block whose tokens are all known."""
        while len(self._keys) <= block:
            start = len(self._keys) * self._block_size
            tokens = [self._tokens[position] for position in range(start, start + self._block_size)]
            self._digest.update(array("q", tokens).tobytes())
            self._keys.append(self._digest.copy().hexdigest())
        return self._keys[block]


class CheckpointScheduler:
    """The checkpoints of one engine."""

    def __init__(self, identity: str, block_size: int, exists: Callable[[str], bool]) -> None:
        """`identity`: model, data types and parallelism, as far as the scheduler knows them.
        `exists`: whether there is a checkpoint of the block with this key."""
        self._identity = identity
        self._block_size = block_size
        self._exists = exists
        self._requests: dict[str, _CheckpointedRequest] = {}
        self._uses: Counter[str] = Counter()
        """Number of requests per key, as requests may share prefixes."""
        self._restorable: dict[str, tuple[int, tuple[str, ...]]] = {}
        """First block and keys, by request id."""
        self._attempted: set[str] = set()
        self._metadata = CheckpointMetadata()

    def count_restorable_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond the computed ones can be restored: never the last one,
        which must be computed to sample the next token."""
        self._restorable.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if (
            request.prompt_token_ids is None
            or request.request_id in self._attempted
            or params.get("do_remote_prefill")
        ):
            return 0
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        hash_chain = PrefixHashChain(self._identity, request, self._block_size)
        keys = tuple(itertools.takewhile(self._exists, map(hash_chain.get_key, range(first, last))))
        if keys:
            self._restorable[request.request_id] = first, keys
        return len(keys) * self._block_size

    def update_after_alloc(
        self, request: Request, blocks: Sequence[Any], num_external_tokens: int
    ) -> None:
        """Restore into the blocks allocated to a request for its `num_external_tokens`."""
        first, keys = self._restorable.pop(request.request_id, (0, ()))
        if keys and num_external_tokens:
            self._attempted.add(request.request_id)
            keys = keys[: num_external_tokens // self._block_size]
            own = tuple(block.block_id for block in blocks[first : first + len(keys)])
            self._metadata.restore[request.request_id] = BlockRestore(keys, own)
        params = request.kv_transfer_params or {}
        if request.prompt_token_ids is not None and not params.get("do_remote_decode"):
            hash_chain = PrefixHashChain(self._identity, request, self._block_size)
            self._requests.setdefault(request.request_id, _CheckpointedRequest(request, hash_chain))

    def finish_request(self, request: Request) -> None:
        """Drop the checkpoints of a finished request."""
        self._restorable.pop(request.request_id, None)
        self._attempted.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._uses.subtract(tracked.saved_keys)
            unused = [key for key in tracked.saved_keys if not self._uses[key]]
            self._metadata.drop += unused
            for key in unused:
                del self._uses[key]

    def build_metadata(self, block_ids: BlockIdLookup) -> CheckpointMetadata:
        """Return the tasks of the step being scheduled, before its tokens count as computed."""
        metadata, self._metadata = self._metadata, CheckpointMetadata()
        for key, block in self._find_full_blocks(block_ids):
            if len(metadata.save) == MAX_BLOCKS_PER_STEP:
                break
            metadata.save[key] = block
        return metadata

    def _find_full_blocks(self, block_ids: BlockIdLookup) -> Iterator[tuple[str, int]]:
        for request_id, tracked in self._requests.items():
            request, saved = tracked.request, tracked.saved_keys
            if request.status is not RequestStatus.RUNNING:
                continue
            num_known = min(request.num_computed_tokens, request.num_tokens)
            if num_known // self._block_size <= len(saved):
                continue
            blocks = block_ids(request_id)
            for block in range(len(saved), num_known // self._block_size):
                key = tracked.hash_chain.get_key(block)
                yield key, blocks[block]
                saved.append(key)
                self._uses[key] += 1
