"""The worker side of the connector: serves leased blocks and pulls those of other engines.

Runs in each rank of an engine. Everything that may block runs in threads, so that no step waits.
The end of each lease and each pull must be reported to vLLM exactly once in all cases, or blocks
are never freed.

`LayerNotifier` runs within a step, so it must cost nothing without consumers. On a GPU the step is
only enqueued when vLLM reports a layer as done; an event recorded after the layer's kernels marks
its completion.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch

from cleave_worker.transfer.block_leases import BlockLeases
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.copy_stream import record_event, select_copy_stream
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.layerwise_client import LayerwiseClient
from cleave_worker.transfer.prefix_client import PrefixRead
from cleave_worker.transfer.progress import Progress
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports.shared_memory import share_memory
from cleave_worker.vllm.kv.metadata import CleaveConnectorMetadata, ComputedChunk, PullTask
from cleave_worker.vllm.kv.metrics import PREFIX_PULLED, KvTransferStats

_log = logging.getLogger(__name__)
_MAX_CONCURRENT_PULLS = 4
"""Concurrent pulls; those from one producer rank run one after the other."""
_MAX_LAYERWISE_PULLS = 64
"""Concurrent pulls of running prefills; further ones wait."""
READ_GRACE_S = 10.0
"""Time of a read beyond `transfer_s` before its blocks are freed."""


@dataclass(frozen=True, slots=True)
class _FinishedPull:
    """The end of a pull."""

    request_id: str
    outcome: Transport | RefusalReason
    """The transport, or why the KV must not be used."""
    seconds: float
    num_bytes: int
    is_prefix: bool
    """Pulled from a prefix cache; else a handoff."""


class TransferGranularity(StrEnum):
    """How much KV is announced at a time; values are those of the setting `granularity`."""

    PROMPT = "prompt"
    CHUNK = "chunk"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings from kv_connector_extra_config."""

    port: int
    """Port of rank 0, 0 for a free one; other ranks use free ports."""
    transports: tuple[Transport, ...]
    lease_s: float
    transfer_s: float
    """Longest time for the bytes of one prompt."""
    check_bytes: bool
    granularity: TransferGranularity = TransferGranularity.LAYER
    layerwise_timeout_s: float = 120.0
    """Longest time of a pull of a running prefill."""


class WorkerSide:
    """The KV transfers of one rank."""

    def __init__(self, kv: RegisteredKv, settings: ConnectorSettings) -> None:
        """Start to serve. Raises OSError when the port is taken."""
        self._block_bytes = sum(layer.block_bytes for layer in kv.layers)
        self._lease_s = settings.lease_s
        shared = share_memory(kv.memory) if Transport.SHARED_MEMORY in settings.transports else ()
        self._leases = BlockLeases(settings.lease_s, settings.transfer_s + READ_GRACE_S)
        port = settings.port if kv.shard.rank == 0 else 0
        self._server = KvServer(kv, self._leases, shared, port, settings.transfer_s)
        self._client = KvClient(
            kv, settings.transports, settings.transfer_s, check_bytes=settings.check_bytes
        )
        device = kv.memory.device
        self.layer_notifier = LayerNotifier(self._leases, settings.granularity, device)
        self._layerwise_client = LayerwiseClient(self._client, settings.layerwise_timeout_s)
        self._pull_pool = ThreadPoolExecutor(
            _MAX_CONCURRENT_PULLS, "kv-pull", select_copy_stream, (device,)
        )
        self._layerwise_pool = ThreadPoolExecutor(
            _MAX_LAYERWISE_PULLS, "kv-follow", select_copy_stream, (device,)
        )
        self._finished_pulls: queue.SimpleQueue[_FinishedPull] = queue.SimpleQueue()
        self._expected_handoffs: dict[str, Handoff] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stats = KvTransferStats()
        self._num_expired = 0
        threading.Thread(target=self._send_heartbeats, name="kv-beat", daemon=True).start()

    @property
    def port(self) -> int:
        """The port at which this rank serves."""
        return self._server.port

    def apply_metadata(self, metadata: CleaveConnectorMetadata) -> None:
        """Apply the leases of a step before it computes: consumers may come with the response."""
        if metadata.addresses:
            self._server.set_rank_addresses(metadata.addresses)
            self._server.prefix_secret = metadata.prefix_secret
        for request_id, prefill in metadata.started_prefills.items():
            self._leases.begin_prefill(request_id, prefill)
        for request_id in metadata.cancelled_prefills:
            self._leases.cancel(request_id)
        self.layer_notifier.begin_step(metadata.computed_chunks)
        for request_id, finished in metadata.finished_prefills.items():
            self._leases.grant(request_id, finished)
        with self._lock:
            self._expected_handoffs.update(metadata.expected_pulls)
            for request_id in metadata.declined_pulls:
                self._expected_handoffs.pop(request_id, None)

    def start_pulls(self, tasks: Mapping[str, PullTask], declined: Mapping[str, Handoff]) -> None:
        """Start the pulls of a step and decline handoffs."""
        for request_id, task in tasks.items():
            is_overlapped = task.handoff.is_overlapped
            pool = self._layerwise_pool if is_overlapped else self._pull_pool
            client = self._layerwise_client if is_overlapped else self._client
            source = (task.handoff, task.prompt_digest, task.first_block, task.blocks)
            pool.submit(self._pull, request_id, partial(client.pull, *source), len(task.blocks))
        for handoff in declined.values():
            self._pull_pool.submit(self._client.decline, handoff)

    def start_prefix_reads(self, reads: Mapping[str, PrefixRead]) -> None:
        """Start to read the prefixes of a step from the caches of other engines."""
        for request_id, read in reads.items():
            pull = partial(self._client.pull_prefix, read)
            self._pull_pool.submit(self._pull, request_id, pull, len(read.blocks), is_prefix=True)

    def take_sent(self) -> set[str]:
        """Return the requests whose leases have ended."""
        freed = self._leases.take_freed()
        expired = self._leases.num_expired
        self._stats.record_expired(expired - self._num_expired)
        self._num_expired = expired
        return freed

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return (requests whose pulls have ended, those of them whose pull failed)."""
        ended_ids: set[str] = set()
        failed: set[str] = set()
        while not self._finished_pulls.empty():
            pull = self._finished_pulls.get()
            ended_ids.add(pull.request_id)
            if isinstance(pull.outcome, Transport):
                self._stats.record_pull(pull.outcome, pull.seconds, pull.num_bytes)
                if pull.is_prefix:
                    self._stats.record_prefix(PREFIX_PULLED)
                continue
            failed.add(pull.request_id)
            if pull.is_prefix:
                self._stats.record_prefix(pull.outcome)
            else:
                self._stats.record_refusal(pull.outcome)
        return ended_ids, failed

    def take_stats(self) -> KvTransferStats:
        """Return statistics since the last step."""
        return self._stats.clone_and_reset()

    def close(self) -> None:
        """Stop serving and pulling."""
        self._stop.set()
        self._server.close()
        self._client.close()
        for pool in (self._pull_pool, self._layerwise_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _pull(
        self,
        request_id: str,
        pull: Callable[[], Transport],
        num_blocks: int,
        *,
        is_prefix: bool = False,
    ) -> None:
        started = time.perf_counter()
        outcome: Transport | RefusalReason = RefusalReason.PEER_LOST
        try:
            outcome = pull()
        except RefusedError as refused:
            outcome = refused.reason
            _log.warning("KV of %s was not pulled: %s: %s", request_id, outcome, refused)
        except Exception:  # noqa: BLE001
            # Unexpected, but the request must not wait forever.
            _log.exception("KV of %s was not pulled", request_id)
        finally:
            with self._lock:
                self._expected_handoffs.pop(request_id, None)
            seconds, size = time.perf_counter() - started, self._block_bytes * num_blocks
            finished = _FinishedPull(request_id, outcome, seconds, size, is_prefix)
            self._finished_pulls.put(finished)

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            self._client.close_lost()
            with self._lock:
                waiting = list(self._expected_handoffs.values())
            if waiting:
                self._client.send_heartbeats(waiting)


class LayerNotifier:
    """Announces the prefills of one rank, step by step."""

    def __init__(
        self, leases: BlockLeases, granularity: TransferGranularity, device: torch.device
    ) -> None:
        self._leases = leases
        self._granularity = granularity
        self._device = device
        self._chunks: Mapping[str, ComputedChunk] = {}
        self._num_layers_done = 0

    def begin_step(self, chunks: Mapping[str, ComputedChunk]) -> None:
        """Begin a step; `chunks`: what it computes of registered prefills, by request id."""
        self._chunks = chunks
        self._num_layers_done = 0

    def finish_layer(self, position: int) -> None:
        """Announce a layer, by its index among the rank's layers (-1: unknown)."""
        # A layer out of order waits for the end of the step.
        if (
            not self._chunks
            or self._granularity is not TransferGranularity.LAYER
            or position != self._num_layers_done
        ):
            return
        self._num_layers_done += 1
        computed = record_event(self._device)
        for request_id, chunk in self._chunks.items():
            before, after = chunk.num_final_before, chunk.num_final_after
            if after > before:
                progress = Progress(before, after, self._num_layers_done)
                self._leases.update_progress(request_id, chunk.blocks, progress, computed)

    def finish_step(self) -> None:
        """Announce the chunks of the step as final."""
        if not self._chunks:
            return
        computed = record_event(self._device)
        for request_id, chunk in self._chunks.items():
            if chunk.is_last or self._granularity is not TransferGranularity.PROMPT:
                progress = Progress(chunk.num_final_after, chunk.num_final_after, 0)
                self._leases.update_progress(request_id, chunk.blocks, progress, computed)
        self._chunks = {}
