"""Copies blocks of running requests to checkpoints and back; the worker side, in each rank.

A block may be reused as soon as its request has ended. So it is copied in the step whose metadata
names it, before that step computes; a thread writes the copy to its file.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from cleave_worker.transfer.checkpoints import CheckpointStore
from cleave_worker.transfer.copy_stream import select_copy_stream, wait_for_copies
from cleave_worker.transfer.handoff import RefusalReason, RefusedError
from cleave_worker.transfer.memory import LayerRegion, Memory
from cleave_worker.vllm.kv.checkpoint_scheduler import BlockRestore, CheckpointMetadata
from cleave_worker.vllm.kv.metrics import KvTransferStats

_log = logging.getLogger(__name__)
_MAX_CONCURRENT_RESTORES = 2
_MAX_QUEUED_COPIES = 64
"""Copies that wait to be written; further blocks are not checkpointed."""
RETENTION_S = 300.0
"""How long checkpoints of a dead engine stay; a request is resumed within 30 s or not at all."""


class CheckpointWorker:
    """The checkpoints of one rank."""

    def __init__(
        self, memory: Memory, layers: Sequence[LayerRegion], checkpoints: CheckpointStore
    ) -> None:
        self._memory = memory
        self._layers = tuple(layers)
        self._block_bytes = sum(layer.block_bytes for layer in self._layers)
        self._checkpoints = checkpoints
        self._queue: queue.Queue[tuple[str, bytes] | list[str] | None] = queue.Queue()
        self._finished: queue.SimpleQueue[tuple[str, RefusedError | None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(
            _MAX_CONCURRENT_RESTORES, "kv-restore", select_copy_stream, (memory.device,)
        )
        self._stats = KvTransferStats()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def start_step(self, metadata: CheckpointMetadata) -> None:
        """Begin a step, before it computes."""
        # Drops first: they are older than blocks of this step that may have the same keys.
        if metadata.drop:
            self._queue.put(metadata.drop)
        for key, block in metadata.save.items():
            # A missing block only ends the restorable prefix of its request.
            if self._queue.qsize() < _MAX_QUEUED_COPIES:
                self._queue.put((key, self._copy(block)))
        for request_id, restore in metadata.restore.items():
            self._pool.submit(self._restore, request_id, restore)

    def take_restored(self) -> tuple[set[str], set[str]]:
        """Return (requests whose restores have ended, those of them whose restore failed)."""
        ended: set[str] = set()
        failed: set[str] = set()
        while not self._finished.empty():
            request_id, refused = self._finished.get()
            ended.add(request_id)
            if refused is not None:
                failed.add(request_id)
                self._stats.record_refusal(refused.reason)
        return ended, failed

    def take_stats(self) -> KvTransferStats:
        """Return statistics since the last step."""
        return self._stats.clone_and_reset()

    def close(self, wait_s: float = 5.0) -> None:
        """End the threads. Checkpoints stay: an engine may end before its requests are resumed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._queue.put(None)
        self._thread.join(wait_s)

    def _copy(self, block: int) -> bytes:
        ranges = (layer.get_range(block) for layer in self._layers)
        return b"".join(map(self._memory.copy_to_host, ranges))

    def _restore(self, request_id: str, restore: BlockRestore) -> None:
        refused: RefusedError | None = RefusedError(RefusalReason.PEER_LOST, "an unexpected error")
        try:
            for key, block in zip(restore.keys, restore.blocks, strict=True):
                self._fill(block, self._checkpoints.load(key, self._block_bytes))
            refused = None
        except RefusedError as error:
            refused = error
            _log.warning("KV of %s was not restored: %s", request_id, error)
        except Exception:  # noqa: BLE001
            # Unexpected, but the request must not wait forever.
            _log.exception("KV of %s was not restored", request_id)
        finally:
            self._finished.put((request_id, refused))

    def _fill(self, block: int, body: memoryview) -> None:
        offset = 0
        for layer in self._layers:
            content = bytearray(body[offset : offset + layer.block_bytes])
            view = self._memory.view(layer.get_range(block))
            view.copy_(torch.frombuffer(content, dtype=torch.uint8))
            offset += layer.block_bytes
        wait_for_copies(self._memory.device)

    def _run(self) -> None:
        collected_at = 0.0
        while True:
            with suppress(queue.Empty):
                work = self._queue.get(timeout=RETENTION_S / 10)
                if work is None:
                    return
                if isinstance(work, tuple):
                    self._checkpoints.save(*work)
                else:
                    self._checkpoints.drop(work)
            if time.monotonic() - collected_at > RETENTION_S / 10:
                collected_at = time.monotonic()
                self._checkpoints.collect_garbage(RETENTION_S)
