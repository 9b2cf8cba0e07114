"""Pulls the KV of a prefill while the producer computes it, chunk by chunk.

Called from worker threads, one per prompt. Progress is awaited on a separate connection, so that
other prompts from the same producer do not wait; bytes arrive over the shared link of `KvClient`.
Chunks arrive one by one, and from several ranks when the producer is sharded differently. They are
valid KV only together, and only if each rank confirms that its blocks were leased from the first
chunk to the last.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.copy_stream import select_copy_stream
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError, refuse_on
from cleave_worker.transfer.progress import NO_PROGRESS, Progress, find_missing_chunks
from cleave_worker.transfer.rank_resolver import RemoteRank
from cleave_worker.transfer.transport import Transport

_CONNECT_TIMEOUT_S = 10.0


class LayerwiseClient:
    """Pulls running prefills from any producer."""

    def __init__(self, reader: KvClient, timeout_s: float) -> None:
        """`timeout_s`: longest time from the first request to the end of a prefill."""
        self._client = reader
        self._timeout_s = timeout_s

    def pull(self, handoff: Handoff, digest: str, first: int, blocks: Sequence[int]) -> Transport:
        """Fill local `blocks` with the producer's blocks from number `first` of the prompt on.

        The handoff is overlapped with its prefill. Returns the transport once all bytes have
        arrived and each remote rank has confirmed its lease. When it raises RefusedError, nothing
        is written any more.
        """
        deadline = time.monotonic() + self._timeout_s
        prompt = _LayerwisePull(handoff, digest, first, tuple(blocks), deadline)
        ranks = self._client.resolve_ranks(handoff)
        try:
            return self._pull_from_all(prompt, [rank for rank in ranks if rank.source.part])
        finally:
            for rank in ranks:
                if not rank.source.part:
                    self._client.decline_rank(rank, handoff)

    def _pull_from_all(self, prompt: "_LayerwisePull", ranks: Sequence[RemoteRank]) -> Transport:
        if len(ranks) == 1:
            return self._pull_from_rank(prompt, ranks[0])
        # The pool's end waits for all ranks: a transfer that still runs writes into the blocks.
        device = self._client.kv.memory.device
        with ThreadPoolExecutor(
            len(ranks), "kv-follow-rank", select_copy_stream, (device,)
        ) as pool:
            futures = [pool.submit(self._pull_from_rank, prompt, rank) for rank in ranks]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            prompt.is_cancelled.set()
            return next(iter([future.result() for future in done]))

    def _pull_from_rank(self, prompt: "_LayerwisePull", rank: RemoteRank) -> Transport:
        connection, handshake = self._client.connect(rank, _CONNECT_TIMEOUT_S)
        # The server treats a closed connection as a release if none was sent.
        with closing(connection):
            transport = self._pull_chunks(prompt, rank, connection, handshake)
            resolved = prompt.resolved
            protocol.release_blocks(connection, resolved.request_id, resolved.epoch)
        return transport

    def _pull_chunks(
        self,
        prompt: "_LayerwisePull",
        rank: RemoteRank,
        connection: protocol.FramedConnection,
        handshake: protocol.HandshakeResponse,
    ) -> Transport:
        first, end = prompt.first, prompt.first + len(prompt.blocks)
        num_layers = len(handshake.layers)
        name = prompt.handoff.request_id
        received, announced = Progress(first, first, 0), NO_PROGRESS
        transport: Transport | None = None
        while True:
            request = protocol.ProgressRequest(name, prompt.digest, announced)
            update = protocol.send_request(
                connection, request, protocol.ProgressUpdate, protocol.RESPONSE_TIMEOUT_S
            )
            handoff = prompt.resolve(update)
            announced = update.progress
            available = announced.clip(range(first, end), handshake.first_layer, num_layers)
            with refuse_on(ValueError, RefusalReason.MALFORMED):
                chunks = find_missing_chunks(received, available, num_layers)
            for chunk in chunks:
                offset = chunk.first_block - first
                own = prompt.blocks[offset : offset + chunk.num_blocks]
                transport = self._client.pull_chunk(rank, handoff, chunk, own)
            received = available
            if received.blocks_done == end and transport:
                return transport
            prompt.check()


@dataclass(slots=True)
class _LayerwisePull:
    """The pull of one prompt from all ranks of a producer."""

    handoff: Handoff
    """Its `request_id` is the name that the producer registered the prefill under."""
    digest: str
    first: int
    blocks: tuple[int, ...]
    deadline: float
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    """One rank has failed, so the chunks from the others are useless."""
    _resolved: Handoff | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def resolved(self) -> Handoff:
        """The handoff with the request id and epoch that the producer reported."""
        assert self._resolved
        return self._resolved

    def check(self) -> None:
        """Raises RefusedError when the pull was cancelled or has timed out."""
        if self.is_cancelled.is_set():
            fault = "the pull from another rank of the producer failed"
            raise RefusedError(RefusalReason.PEER_LOST, fault)
        if time.monotonic() > self.deadline:
            raise RefusedError(RefusalReason.TIME_OUT, "the prefill did not finish in time")

    def resolve(self, update: protocol.ProgressUpdate) -> Handoff:
        """Return the handoff with the update's identity. Raises RefusedError when this changes."""
        identity = {"request_id": update.request_id, "epoch": update.epoch}
        now = msgspec.structs.replace(self.handoff, prompt_digest=self.digest, **identity)
        with self._lock:
            self._resolved = self._resolved or now
            if self._resolved != now:
                fault = f"epoch {update.epoch} continues what {self._resolved.epoch} began"
                raise RefusedError(RefusalReason.EPOCH, fault)
            return self._resolved
