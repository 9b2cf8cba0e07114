"""Copies blocks of running streams to checkpoints and back. The workers' half, in each rank.

What is hard: a block may be somebody else's as soon as its stream has ended, so it is copied in the
step that orders it, before that step computes; only the copy is written by another thread.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from cleave_worker.transfer.checkpoints import Checkpoints
from cleave_worker.transfer.identity import Reason, RefusedError
from cleave_worker.transfer.memory import Memory, Plane
from cleave_worker.vllm.kv.keeper import KeepOrders, Restore
from cleave_worker.vllm.kv.metrics import Transfers

_log = logging.getLogger(__name__)
_RESTORES = 2
"""Side by side."""
_WAITING = 64
"""Copies of blocks that wait to be written; further ones are left out."""
KEEP_S = 300.0
"""How long what a dead engine has left stays; streams wait no longer than 30 s to be resumed."""


class Saver:
    """One rank's."""

    def __init__(self, memory: Memory, planes: Sequence[Plane], checkpoints: Checkpoints) -> None:
        self._memory = memory
        self._planes = tuple(planes)
        self._block_bytes = sum(plane.block_bytes for plane in self._planes)
        self._checkpoints = checkpoints
        self._work: queue.Queue[tuple[str, bytes] | list[str] | None] = queue.Queue()
        self._ended: queue.SimpleQueue[tuple[str, RefusedError | None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(_RESTORES, "kv-restore")
        self._transfers = Transfers()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def start(self, orders: KeepOrders) -> None:
        """Before a step computes."""
        # What has ended is older than what begins with the same tokens.
        if orders.drop:
            self._work.put(orders.drop)
        for key, block in orders.save.items():
            # One that is left out ends what can be restored of its stream there.
            if self._work.qsize() < _WAITING:
                self._work.put((key, self._copy(block)))
        for request_id, restore in orders.restore.items():
            self._pool.submit(self._restore, request_id, restore)

    def take_restored(self) -> tuple[set[str], set[str]]:
        """(restores that are over, those of them that failed)."""
        over: set[str] = set()
        failed: set[str] = set()
        while not self._ended.empty():
            request_id, refused = self._ended.get()
            over.add(request_id)
            if refused is not None:
                failed.add(request_id)
                self._transfers.refused(refused.reason)
        return over, failed

    def take_transfers(self) -> Transfers:
        """What has happened since the last step."""
        return self._transfers.clone_and_reset()

    def close(self, wait_s: float = 5.0) -> None:
        """End the threads. What is kept stays: an engine may end before its streams do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._work.put(None)
        self._thread.join(wait_s)

    def _copy(self, block: int) -> bytes:
        views = (self._memory.view(plane.span(block)) for plane in self._planes)
        return b"".join(memoryview(view.cpu().numpy()) for view in views)

    def _restore(self, request_id: str, restore: Restore) -> None:
        refused: RefusedError | None = RefusedError(Reason.LOST, "something unforeseen")
        try:
            for key, block in zip(restore.keys, restore.blocks, strict=True):
                self._fill(block, self._checkpoints.load(key, self._block_bytes))
            refused = None
        except RefusedError as error:
            refused = error
            _log.warning("KV of %s was not restored: %s", request_id, error)
        except Exception:  # noqa: BLE001
            # Unforeseen, but the request still waits for its end.
            _log.exception("KV of %s was not restored", request_id)
        finally:
            self._ended.put((request_id, refused))

    def _fill(self, block: int, body: memoryview) -> None:
        at = 0
        for plane in self._planes:
            part = torch.frombuffer(bytearray(body[at : at + plane.block_bytes]), dtype=torch.uint8)
            self._memory.view(plane.span(block)).copy_(part)
            at += plane.block_bytes

    def _run(self) -> None:
        swept = 0.0
        while True:
            with suppress(queue.Empty):
                work = self._work.get(timeout=KEEP_S / 10)
                if work is None:
                    return
                self._do(work)
            if time.monotonic() - swept > KEEP_S / 10:
                swept = time.monotonic()
                self._checkpoints.sweep(KEEP_S)

    def _do(self, work: tuple[str, bytes] | list[str]) -> None:
        if isinstance(work, tuple):
            self._checkpoints.save(*work)
        else:
            self._checkpoints.drop(work)
