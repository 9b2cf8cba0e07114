"""Prefixes that an engine pulls from the prefix caches of others: the scheduler side.

The gateway names the engine that probably has the beginning of a prompt. When vLLM would schedule
the prompt, the blocks that this engine lacks are requested there in a thread, and vLLM is answered
"not yet"; it repeats the question in its next step. The lease lasts until the ranks have read the
blocks, or the request ends. After any failure the prompt is computed.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.request import Request

from cleave_worker.transfer.handoff import RefusalReason, RefusedError
from cleave_worker.transfer.prefix_client import (
    LeasedPrefix,
    PrefixRead,
    SourceAddress,
    request_prefix,
)
from cleave_worker.vllm.kv.metrics import PREFIX_MISSING, KvTransferStats

_log = logging.getLogger(__name__)
_PARAMS_KEY = "prefix_source"
"""Key of a source in vLLM's kv_transfer_params."""
_MAX_REQUESTS = 8
"""Concurrent requests for leases; a request takes milliseconds while its source is idle, and a step
while it is busy."""
_MAX_LOOKUPS = 8
"""Prompts with a lease at a time, from the request for it until it is read."""
_LOOKUP_TIMEOUT_S = 2.0
"""Longest wait for a lease, and before for that of another prompt with the same beginning, which
this engine then has; later the prompt is computed."""
_MAX_LEASE_AGE_S = 20.0
"""Age from which a lease is not used any more: its source ends it after twice as long, and a prompt
may wait for room meanwhile."""
_AVOIDED_S = 30.0
"""How long an engine that could not be reached is left alone; an attempt takes seconds."""


@dataclass(slots=True)
class _Lookup:
    """A lease that was requested for a prompt."""

    first_block: int
    first_key: bytes
    lease: Future[LeasedPrefix]
    requested_s: float
    """By the monotonic clock."""
    prefix: LeasedPrefix | None = None
    """None: not here yet, or there is none."""
    num_cached: int = 0
    """Blocks that this engine had at vLLM's last question."""


class PrefixPulls:
    """The prefixes of one engine's waiting requests."""

    def __init__(self, boot_id: str, block_size: int) -> None:
        self._boot_id = boot_id
        self._block_size = block_size
        self._sources: dict[str, SourceAddress] = {}
        self._lookups: dict[str, _Lookup] = {}
        """By request id, until the prefix is read."""
        self._waiting_since: dict[str, float] = {}
        """Requests that may not look up yet, by the monotonic clock."""
        self._reads: dict[str, PrefixRead] = {}
        self._avoided_until: dict[str, float] = {}
        """Engines that could not be reached, by boot id."""
        self._pool = ThreadPoolExecutor(_MAX_REQUESTS, "prefix-lease")
        self._stats = KvTransferStats()

    def on_new_request(self, request: Request) -> None:
        """Read where the beginning of a prompt probably is."""
        params = request.kv_transfer_params or {}
        if params.get(_PARAMS_KEY) is None or request.prompt_token_ids is None:
            return
        if request.skip_reading_prefix_cache:
            return
        try:
            source = msgspec.convert(params[_PARAMS_KEY], SourceAddress)
        except msgspec.ValidationError:
            self._stats.record_prefix(RefusalReason.MALFORMED)
            return
        if source.engine_id != self._boot_id:
            self._sources[request.request_id] = source

    def count_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the tokens to pull beyond those that this engine has cached; None: not known yet.
        The last token of a prompt is computed in any case, to sample the next one."""
        lookup = self._lookups.get(request.request_id)
        first = num_computed_tokens // self._block_size
        if lookup is None:
            return self._start_lookup(request, first)
        age_s = time.monotonic() - lookup.requested_s
        if not lookup.lease.done():
            return None if age_s < _LOOKUP_TIMEOUT_S else self._give_up(request)
        if age_s > _MAX_LEASE_AGE_S:
            return self._give_up(request)
        if lookup.prefix is None:
            lookup.prefix = self._take_lease(lookup.lease)
        count = len(lookup.prefix.lease.blocks) if lookup.prefix else 0
        num_missing = lookup.first_block + count - first
        # A block that was cached when the lease was requested may be evicted by now.
        if num_missing <= 0 or first < lookup.first_block:
            self.end(request.request_id)
            return 0
        lookup.num_cached = first
        return num_missing * self._block_size

    def update_after_alloc(
        self, request: Request, blocks: Sequence[Any], num_external_tokens: int
    ) -> None:
        """Read into the blocks allocated to a request for its `num_external_tokens`."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.prefix is None:
            return
        first, count = lookup.num_cached, num_external_tokens // self._block_size
        if not count:
            self.end(request.request_id)
            return
        local = tuple(block.block_id for block in blocks[first : first + count])
        source, lease = lookup.prefix.source, lookup.prefix.lease
        read = PrefixRead(source, lease, first - lookup.first_block, local)
        self._reads[request.request_id] = read

    def take_reads(self) -> dict[str, PrefixRead]:
        """Return what the ranks are to read now, by request id."""
        reads, self._reads = self._reads, {}
        return reads

    def end(self, request_id: str) -> None:
        """End what is left of a request: its prefix was read, is not needed, or it has ended."""
        self._forget_source(request_id)
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None and not lookup.lease.cancel():
            lookup.lease.add_done_callback(_end_lease)

    def take_stats(self) -> KvTransferStats:
        """Return statistics since the last step."""
        return self._stats.clone_and_reset()

    def close(self) -> None:
        """End all leases."""
        for request_id in list(self._lookups):
            self.end(request_id)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_lookup(self, request: Request, first: int) -> int | None:
        source = self._sources.get(request.request_id)
        if source is None:
            return 0
        last = (request.num_prompt_tokens - 1) // self._block_size
        keys, now = request.block_hashes[first:last], time.monotonic()
        is_useful = bool(keys) and not self._is_avoided(source)
        must_wait = is_useful and not self._may_look_up(keys[0])
        since = self._waiting_since.setdefault(request.request_id, now)
        if must_wait and now - since < _LOOKUP_TIMEOUT_S:
            return None
        # Only once: if it fails, the prompt is computed here.
        self._forget_source(request.request_id)
        if must_wait or not is_useful:
            return 0
        lease = self._pool.submit(self._request, source, keys)
        self._lookups[request.request_id] = _Lookup(first, keys[0], lease, now)
        return None

    def _may_look_up(self, key: bytes) -> bool:
        """Whether a prompt that lacks the blocks from this one on may request a lease."""
        is_coming = any(each.first_key == key for each in self._lookups.values())
        return len(self._lookups) < _MAX_LOOKUPS and not is_coming

    def _forget_source(self, request_id: str) -> None:
        self._sources.pop(request_id, None)
        self._waiting_since.pop(request_id, None)

    def _give_up(self, request: Request) -> int:
        """Compute a prompt whose lease takes too long, or may end before it is read."""
        self._stats.record_prefix(RefusalReason.TIME_OUT)
        self.end(request.request_id)
        return 0

    def _request(self, source: SourceAddress, keys: Sequence[bytes]) -> LeasedPrefix:
        """Run in a thread. Raises RefusedError."""
        if self._is_avoided(source):
            raise RefusedError(RefusalReason.PEER_LOST, "it was not reached before")
        try:
            return request_prefix(source, keys)
        except RefusedError as refused:
            if refused.reason in (RefusalReason.PEER_LOST, RefusalReason.TIME_OUT):
                self._avoided_until[source.engine_id] = time.monotonic() + _AVOIDED_S
            raise

    def _is_avoided(self, source: SourceAddress) -> bool:
        now = time.monotonic()
        for boot_id in [one for one, until in self._avoided_until.copy().items() if until <= now]:
            self._avoided_until.pop(boot_id, None)
        return source.engine_id in self._avoided_until

    def _take_lease(self, lease: Future[LeasedPrefix]) -> LeasedPrefix | None:
        """Return a lease that has been answered; None if it was refused."""
        try:
            prefix = lease.result()
        except RefusedError as refused:
            self._stats.record_prefix(refused.reason)
            _log.info("no prefix was leased: %s", refused)
            return None
        except Exception:  # noqa: BLE001
            # Unexpected, but the prompt can be computed.
            self._stats.record_prefix(RefusalReason.PEER_LOST)
            _log.exception("no prefix was leased")
            return None
        if not prefix.lease.blocks:
            self._stats.record_prefix(PREFIX_MISSING)
        return prefix


def _end_lease(lease: Future[LeasedPrefix]) -> None:
    if not lease.cancelled() and not lease.exception():
        lease.result().end()
