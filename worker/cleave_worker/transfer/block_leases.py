"""Leases on the KV blocks of prefills: which blocks an engine must not reuse until they are pulled.

Shared by the engine's thread, which leases and frees, and the server threads that serve consumers.
Blocks must not be freed while a consumer reads them, and a consumer that hangs must not pin them
forever. So each read has its own deadline; a consumer that missed it learns this when it releases
the blocks, and discards what it has read. The ranks of one engine may pull a prefill layer by layer
while it runs: its lease then starts when it ends, and blocks that are released earlier are freed at
the end.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from cleave_worker.transfer.handoff import RefusalReason, RefusedError
from cleave_worker.transfer.leases import LeaseTable
from cleave_worker.transfer.progress import NO_PROGRESS, KvChunk, Progress
from cleave_worker.transfer.protocol import ProgressUpdate

_MAX_PAST_REQUESTS = 4096
"""Past requests that are remembered; a request for one of them is refused without waiting."""


@dataclass(frozen=True, slots=True)
class ConsumerRank:
    """A rank of a consumer engine."""

    boot_id: str
    rank: int
    num_ranks: int
    """Number of ranks of that engine that will connect to this producer rank."""


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A request for blocks of a leased prompt."""

    request_id: str
    epoch: int
    prompt_digest: str
    first_block: int
    num_blocks: int


class ComputeEvent(Protocol):
    """A point in a GPU's command queue, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block until the GPU has reached this point."""


@dataclass(frozen=True, slots=True)
class FinishedPrefill:
    """A finished prefill whose blocks can be pulled."""

    epoch: int
    prompt_digest: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillInProgress:
    """A running prefill that a consumer may pull layer by layer."""

    epoch: int
    prompt_digest: str
    num_blocks: int
    """Blocks that the prompt will have when it is computed."""
    name: str
    """The consumers' name for the request, as they do not have the engine's request id yet."""


@dataclass(slots=True)
class _Lease:
    """A prefill that consumers may pull, running or finished."""

    prefill: FinishedPrefill
    num_blocks: int
    progress: Progress
    name: str = ""
    compute_event: ComputeEvent | None = None
    """`progress` holds once the GPU has reached this point; None: it holds already."""
    is_finished: bool = True
    consumers: set[ConsumerRank] = field(default_factory=set)
    """All are ranks of one engine."""
    is_released: bool = False
    """Released by its consumers before it has finished."""


class BlockLeases:
    """Leases by request id; one object per rank."""

    def __init__(self, lease_s: float, reading_s: float) -> None:
        """`reading_s`: longest time in seconds from the start of a read to its release."""
        self._leases = LeaseTable(lease_s)
        self._read_timeout_s = reading_s
        self._prefills: dict[str, _Lease] = {}
        self._request_ids: dict[str, str] = {}
        """Name of a running prefill to the engine's request id."""
        self._read_deadlines: dict[str, float] = {}
        self._past_requests: OrderedDict[str, None] = OrderedDict()
        self._freed: set[str] = set()
        self._changed = threading.Condition()
        self.num_expired = 0

    def grant(self, request_id: str, prefill: FinishedPrefill) -> None:
        """Start the lease of a prefill that has just finished."""
        with self._changed:
            previous = self._prefills.get(request_id)
            count = len(prefill.blocks)
            leased = _Lease(prefill, count, Progress(count, count, 0))
            self._prefills[request_id] = leased
            self._past_requests.pop(request_id, None)
            self._leases.grant(request_id, time.monotonic())
            if previous is not None:
                leased.name, leased.consumers = previous.name, previous.consumers
                if previous.consumers:
                    self._read_deadlines[request_id] = time.monotonic() + self._read_timeout_s
                if previous.is_released:
                    self._free(request_id)
            self._changed.notify_all()

    def begin_prefill(self, request_id: str, begun: PrefillInProgress) -> None:
        """Register a running prefill for layerwise consumers; none of it is computed yet."""
        with self._changed:
            prefill = FinishedPrefill(begun.epoch, begun.prompt_digest, ())
            leased = _Lease(prefill, begun.num_blocks, NO_PROGRESS, begun.name, is_finished=False)
            # The consumer may have declined it before it was registered.
            leased.is_released = begun.name in self._past_requests
            self._prefills[request_id] = leased
            self._request_ids[begun.name] = request_id
            self._changed.notify_all()

    def update_progress(
        self,
        request_id: str,
        blocks: tuple[int, ...],
        progress: Progress,
        computed: ComputeEvent | None = None,
    ) -> None:
        """Record progress that holds now, or once the GPU has reached `computed`. `blocks`: all
        blocks that the prompt has so far."""
        with self._changed:
            leased = self._prefills.get(request_id)
            if leased is None or leased.is_finished:
                return
            if len(blocks) != len(leased.prefill.blocks):
                leased.prefill = replace(leased.prefill, blocks=blocks)
            leased.progress, leased.compute_event = progress, computed
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Forget a running prefill that was aborted, or preempted and so is computed again."""
        with self._changed:
            leased = self._prefills.get(request_id)
            if leased is not None and not leased.is_finished:
                self._remove(request_id)

    def wait_for_progress(
        self,
        consumer: ConsumerRank,
        name: str,
        prompt_digest: str,
        previous: Progress,
        wait_s: float,
        *,
        is_repeat: bool,
    ) -> ProgressUpdate:
        """Wait until a prefill has more than `previous`. Raises RefusedError.

        Returns the unchanged progress after `wait_s`. `is_repeat`: not this consumer rank's first
        call. The first call reserves the prefill for one engine, whose calling ranks must all
        release it.
        """
        # 1. Wait for progress. 2. Reserve the prefill for this engine. 3. Start the deadline of a
        # finished prefill. 4. Wait for the GPU, outside the lock, so that the progress holds.
        with self._changed:
            self._changed.wait_for(lambda: self._has_more(name, previous), wait_s)
            leased = self._get_prefill(self._request_ids.get(name, ""), prompt_digest)
            engines = {rank.boot_id for rank in leased.consumers}
            if engines - {consumer.boot_id} or (consumer in leased.consumers) is not is_repeat:
                raise RefusedError(RefusalReason.BUSY, "another consumer reads it, or has read it")
            leased.consumers.add(consumer)
            request_id, event = self._request_ids[name], leased.compute_event
            update = ProgressUpdate(request_id, leased.prefill.epoch, leased.progress)
            if leased.is_finished:
                self._read_deadlines.setdefault(request_id, time.monotonic() + self._read_timeout_s)
        if event is not None:
            event.synchronize()
        return update

    def get_chunk_blocks(
        self, consumer: ConsumerRank, request_id: str, epoch: int, digest: str, chunk: KvChunk
    ) -> tuple[int, ...]:
        """Return the blocks of a chunk for a layerwise consumer. Raises RefusedError."""
        with self._changed:
            self._expire()
            leased = self._get_prefill(request_id, digest, epoch)
            progress, end = leased.progress, chunk.first_block + chunk.num_blocks
            final = end <= progress.blocks_done or (
                end <= progress.blocks_started
                and chunk.first_layer + chunk.num_layers <= progress.layers_done
            )
            blocks = leased.prefill.blocks[chunk.first_block : end]
            if consumer not in leased.consumers or not final or len(blocks) != chunk.num_blocks:
                fault = "the chunk was not announced to this consumer"
                raise RefusedError(RefusalReason.MALFORMED, fault)
            return blocks

    def acquire(self, request: BlockRequest, wait_s: float) -> tuple[int, ...]:
        """Lease blocks to a consumer, which must release them. Raises RefusedError.

        A consumer may request blocks before the engine has reported the end of the prefill. It then
        waits up to `wait_s`, unless the request is known to be over.
        """
        with self._changed:
            request_id, first = request.request_id, request.first_block
            self._changed.wait_for(lambda: self._is_decided(request_id), wait_s)
            self._expire()
            leased = self._get_prefill(request_id, request.prompt_digest, request.epoch)
            if not leased.is_finished:
                raise RefusedError(RefusalReason.NOT_HELD, "the prefill is still running")
            if request_id in self._read_deadlines:
                raise RefusedError(RefusalReason.BUSY, "another consumer reads it")
            granted = leased.prefill.blocks[first : first + request.num_blocks]
            if first < 0 or len(granted) != request.num_blocks:
                fault = f"{len(leased.prefill.blocks)} blocks are leased"
                raise RefusedError(RefusalReason.MALFORMED, fault)
            self._read_deadlines[request_id] = time.monotonic() + self._read_timeout_s
            return granted

    def release(self, request_id: str, epoch: int) -> bool:
        """Free the blocks; return whether all of them were leased until now. With epoch 0
        `request_id` is a prefill's name, also of a prefill that is not registered yet."""
        with self._changed:
            self._expire()
            if not epoch:
                self._record_past(request_id)
                request_id = self._request_ids.get(request_id, "")
            leased = self._prefills.get(request_id)
            if leased is None or epoch not in (0, leased.prefill.epoch):
                return False
            if leased.is_finished:
                self._free(request_id)
                return True
            leased.is_released = True
            return leased.progress.blocks_done == leased.num_blocks

    def is_complete(self, request_id: str, epoch: int) -> bool:
        """Return whether a prefill is complete and still leased."""
        with self._changed:
            self._expire()
            leased = self._prefills.get(request_id)
            if leased is None or leased.prefill.epoch != epoch:
                return False
            return leased.progress.blocks_done == leased.num_blocks

    def extend(self, request_ids: Iterable[str]) -> None:
        """Extend the leases of these requests, by id or by name, after a heartbeat."""
        with self._changed:
            now = time.monotonic()
            self._expire()
            for request_id in request_ids:
                self._leases.extend(self._request_ids.get(request_id, request_id), now)

    def take_freed(self) -> set[str]:
        """Return the requests whose blocks the engine may reuse; each is returned once."""
        with self._changed:
            self._expire()
            freed, self._freed = self._freed, set()
            return freed

    @property
    def num_leased(self) -> int:
        """Requests whose blocks are leased now."""
        with self._changed:
            return len(self._prefills)

    def _expire(self) -> None:
        now = time.monotonic()
        overdue = [read_id for read_id, deadline in self._read_deadlines.items() if deadline <= now]
        for request_id in [*overdue, *self._leases.expire(now)]:
            # A lease that ends during a read lasts until the deadline of that read.
            if self._read_deadlines.get(request_id, now) <= now and request_id in self._prefills:
                self.num_expired += 1
                self._free(request_id)

    def _is_decided(self, request_id: str) -> bool:
        leased = self._prefills.get(request_id)
        return leased.is_finished if leased is not None else request_id in self._past_requests

    def _has_more(self, name: str, previous: Progress) -> bool:
        leased = self._prefills.get(self._request_ids.get(name, ""))
        return leased.progress != previous if leased is not None else name in self._past_requests

    def _get_prefill(self, request_id: str, prompt_digest: str, epoch: int | None = None) -> _Lease:
        leased = self._prefills.get(request_id)
        if leased is None:
            raise RefusedError(RefusalReason.NOT_HELD, "no lease for this request, or it has ended")
        if epoch not in (None, leased.prefill.epoch):
            fault = f"leased with epoch {leased.prefill.epoch}, not {epoch}"
            raise RefusedError(RefusalReason.EPOCH, fault)
        if leased.prefill.prompt_digest != prompt_digest:
            raise RefusedError(RefusalReason.PROMPT, "leased for other prompt tokens")
        return leased

    def _free(self, request_id: str) -> None:
        self._freed.add(request_id)
        self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        leased = self._prefills.pop(request_id)
        self._read_deadlines.pop(request_id, None)
        self._leases.end(request_id)
        self._record_past(request_id)
        if self._request_ids.get(leased.name) == request_id:
            del self._request_ids[leased.name]
            self._record_past(leased.name)
        self._changed.notify_all()

    def _record_past(self, request_id: str) -> None:
        self._past_requests[request_id] = None
        while len(self._past_requests) > _MAX_PAST_REQUESTS:
            self._past_requests.popitem(last=False)
