"""The workers' half of the connector: serves what is held, pulls what is wanted.

Runs in each rank of an engine; everything that may wait runs in threads of its own, so that no step
ever does. What is hard: vLLM must hear exactly once of the end of each hold and each pull, whatever
comes of it, or blocks are lost for ever.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from cleave_worker.transfer.follower import Follower
from cleave_worker.transfer.holds import Holds
from cleave_worker.transfer.identity import HandOff, Reason, RefusedError
from cleave_worker.transfer.link import Way
from cleave_worker.transfer.owner import Kept, Owner
from cleave_worker.transfer.reader import Reader
from cleave_worker.transfer.shared import share
from cleave_worker.vllm.kv.announcing import Announcer, Pace
from cleave_worker.vllm.kv.metrics import Transfers
from cleave_worker.vllm.kv.orders import Orders, Wanted

_log = logging.getLogger(__name__)
_PULLS = 4
"""Side by side; those from one owner are moved one after the other."""
_FOLLOWS = 64
"""Prompts of this rank that come while they are computed; further ones wait."""
_GRACE_S = 10.0
"""What a reader gets beyond the longest transfer before its blocks are taken away."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of kv_connector_extra_config."""

    port: int
    """Of rank 0, 0: a free one; other ranks take free ones."""
    ways: tuple[Way, ...]
    lease_s: float
    transfer_s: float
    """Longest time for one prompt's bytes."""
    check_bytes: bool
    pace: Pace = Pace.LAYER
    """Of prefills that are followed."""
    patience_s: float = 120.0
    """Longest time for which one is followed."""


class _Ended(NamedTuple):
    """A pull that is over."""

    request_id: str
    how: Way | Reason
    """The way that the bytes took, or why they are not to be used."""
    seconds: float
    num_bytes: int


class WorkerSide:
    """One rank's."""

    def __init__(self, kept: Kept, settings: Settings) -> None:
        """Serve from now on. Raises OSError when the port is taken."""
        self._block_bytes = sum(plane.block_bytes for plane in kept.planes)
        self._lease_s = settings.lease_s
        shared = share(kept.memory) if Way.SHARED_MEMORY in settings.ways else ()
        self._holds = Holds(settings.lease_s, settings.transfer_s + _GRACE_S)
        port = settings.port if kept.share.rank == 0 else 0
        self._owner = Owner(kept, self._holds, shared, port, settings.transfer_s)
        self._reader = Reader(
            kept, settings.ways, settings.transfer_s, check_bytes=settings.check_bytes
        )
        self._announcer = Announcer(self._holds, settings.pace, kept.memory.regions[0].device)
        self._follower = Follower(self._reader, settings.patience_s)
        self._pool = ThreadPoolExecutor(_PULLS, "kv-pull")
        self._following = ThreadPoolExecutor(_FOLLOWS, "kv-follow")
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._expected: dict[str, HandOff] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._transfers = Transfers()
        self._num_expired = 0
        threading.Thread(target=self._beat, name="kv-beat", daemon=True).start()

    @property
    def port(self) -> int:
        """Where this rank serves."""
        return self._owner.port

    def note(self, orders: Orders) -> None:
        """Before a step computes: readers may come as soon as the answer is out."""
        if orders.addresses:
            self._owner.locate(orders.addresses)
        for request_id, begun in orders.begin.items():
            self._holds.begin(request_id, begun)
        for request_id in orders.give_up:
            self._holds.give_up(request_id)
        self._announcer.begin(orders.compute)
        for request_id, held in orders.hold.items():
            self._holds.hold(request_id, held)
        with self._lock:
            self._expected.update(orders.expect)
            for request_id in orders.decline:
                self._expected.pop(request_id, None)

    def start(self, wanted: Mapping[str, Wanted], declined: Mapping[str, HandOff]) -> None:
        """Begin what the step asks for."""
        for request_id, one in wanted.items():
            pool = self._following if one.hand_off.ahead else self._pool
            pool.submit(self._pull, request_id, one)
        for hand_off in declined.values():
            self._pool.submit(self._reader.decline, hand_off)

    def layer_done(self, plane: int) -> None:
        """The step is through with a layer."""
        self._announcer.layer_done(plane)

    def step_done(self) -> None:
        """The step is through with all layers."""
        self._announcer.step_done()

    def take_sent(self) -> set[str]:
        """Holds that are over."""
        freed = self._holds.take_freed()
        expired = self._holds.num_expired
        self._transfers.expired(expired - self._num_expired)
        self._num_expired = expired
        return freed

    def take_received(self) -> tuple[set[str], set[str]]:
        """(pulls that are over, those of them that failed)."""
        over: set[str] = set()
        failed: set[str] = set()
        while not self._ended.empty():
            ended = self._ended.get()
            over.add(ended.request_id)
            if isinstance(ended.how, Way):
                self._transfers.pulled(ended.how, ended.seconds, ended.num_bytes)
            else:
                failed.add(ended.request_id)
                self._transfers.refused(ended.how)
        return over, failed

    def take_transfers(self) -> Transfers:
        """What has happened since the last step."""
        return self._transfers.clone_and_reset()

    def close(self) -> None:
        """Stop serving and pulling."""
        self._stop.set()
        self._owner.close()
        self._reader.close()
        for pool in (self._pool, self._following):
            pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, request_id: str, wanted: Wanted) -> None:
        begun = time.perf_counter()
        how: Way | Reason = Reason.LOST
        try:
            follows = wanted.hand_off.ahead
            how = (self._follower.follow if follows else self._reader.pull)(
                wanted.hand_off, wanted.prompt_digest, wanted.first_block, wanted.blocks
            )
        except RefusedError as refused:
            how = refused.reason
            _log.warning("KV of %s was not pulled: %s: %s", request_id, how, refused)
        except Exception:  # noqa: BLE001
            # Unforeseen, but the request still waits for its end.
            _log.exception("KV of %s was not pulled", request_id)
        finally:
            with self._lock:
                self._expected.pop(request_id, None)
            size = self._block_bytes * len(wanted.blocks)
            self._ended.put(_Ended(request_id, how, time.perf_counter() - begun, size))

    def _beat(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            with self._lock:
                waiting = list(self._expected.values())
            if waiting:
                self._reader.beat(waiting)
