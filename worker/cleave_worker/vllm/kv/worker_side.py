"""The worker side of the connector: serves leased blocks and pulls those of other engines.

Runs in each rank of an engine. Everything that may block runs in threads, so that no step waits.
What is hard: vLLM must be told exactly once of the end of each lease and each pull, whatever
happens, or blocks are never freed.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from cleave_worker.transfer.block_leases import Holds
from cleave_worker.transfer.client import Reader
from cleave_worker.transfer.handoff import HandOff, Reason, RefusedError
from cleave_worker.transfer.layerwise_client import Follower
from cleave_worker.transfer.server import Kept, Owner
from cleave_worker.transfer.transport import Way
from cleave_worker.transfer.transports.shared_memory import share
from cleave_worker.vllm.kv.layerwise_worker import Announcer, Pace
from cleave_worker.vllm.kv.metadata import Orders, Wanted
from cleave_worker.vllm.kv.metrics import Transfers

_log = logging.getLogger(__name__)
_PULLS = 4
"""Concurrent pulls; those from one producer rank run one after the other."""
_FOLLOWS = 64
"""Concurrent pulls of running prefills; further ones wait."""
_GRACE_S = 10.0
"""Time of a read beyond `transfer_s` before its blocks are freed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from kv_connector_extra_config."""

    port: int
    """Port of rank 0, 0 for a free one; other ranks use free ports."""
    ways: tuple[Way, ...]
    lease_s: float
    transfer_s: float
    """Longest time for the bytes of one prompt."""
    check_bytes: bool
    pace: Pace = Pace.LAYER
    """How much KV of a running prefill is announced at a time."""
    patience_s: float = 120.0
    """Longest time of a pull of a running prefill."""


class _Ended(NamedTuple):
    """A pull that has ended."""

    request_id: str
    how: Way | Reason
    """The transport that was used, or why the KV must not be used."""
    seconds: float
    num_bytes: int


class WorkerSide:
    """The KV transfers of one rank."""

    def __init__(self, kv: Kept, settings: Settings) -> None:
        """Start to serve. Raises OSError when the port is taken."""
        self._block_bytes = sum(layer.block_bytes for layer in kv.planes)
        self._lease_s = settings.lease_s
        shared = share(kv.memory) if Way.SHARED_MEMORY in settings.ways else ()
        self._holds = Holds(settings.lease_s, settings.transfer_s + _GRACE_S)
        port = settings.port if kv.share.rank == 0 else 0
        self._owner = Owner(kv, self._holds, shared, port, settings.transfer_s)
        self._reader = Reader(
            kv, settings.ways, settings.transfer_s, check_bytes=settings.check_bytes
        )
        self._announcer = Announcer(self._holds, settings.pace, kv.memory.regions[0].device)
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
        """The port at which this rank serves."""
        return self._owner.port

    def note(self, metadata: Orders) -> None:
        """Apply the leases of a step before it computes: consumers may come with the response."""
        if metadata.addresses:
            self._owner.locate(metadata.addresses)
        for request_id, prefill in metadata.begin.items():
            self._holds.begin(request_id, prefill)
        for request_id in metadata.give_up:
            self._holds.give_up(request_id)
        self._announcer.begin(metadata.compute)
        for request_id, finished in metadata.hold.items():
            self._holds.hold(request_id, finished)
        with self._lock:
            self._expected.update(metadata.expect)
            for request_id in metadata.decline:
                self._expected.pop(request_id, None)

    def start(self, tasks: Mapping[str, Wanted], declined: Mapping[str, HandOff]) -> None:
        """Start the pulls of a step and decline handoffs."""
        for request_id, task in tasks.items():
            pool = self._following if task.hand_off.ahead else self._pool
            pool.submit(self._pull, request_id, task)
        for handoff in declined.values():
            self._pool.submit(self._reader.decline, handoff)

    def layer_done(self, position: int) -> None:
        """Announce that the step has finished a layer."""
        self._announcer.layer_done(position)

    def step_done(self) -> None:
        """Announce that the step has finished all layers."""
        self._announcer.step_done()

    def take_sent(self) -> set[str]:
        """Return the requests whose leases have ended."""
        freed = self._holds.take_freed()
        expired = self._holds.num_expired
        self._transfers.expired(expired - self._num_expired)
        self._num_expired = expired
        return freed

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return (requests whose pulls have ended, those of them whose pull failed)."""
        ended_ids: set[str] = set()
        failed: set[str] = set()
        while not self._ended.empty():
            ended = self._ended.get()
            ended_ids.add(ended.request_id)
            if isinstance(ended.how, Way):
                self._transfers.pulled(ended.how, ended.seconds, ended.num_bytes)
            else:
                failed.add(ended.request_id)
                self._transfers.refused(ended.how)
        return ended_ids, failed

    def take_transfers(self) -> Transfers:
        """Return statistics since the last step."""
        return self._transfers.clone_and_reset()

    def close(self) -> None:
        """Stop serving and pulling."""
        self._stop.set()
        self._owner.close()
        self._reader.close()
        for pool in (self._pool, self._following):
            pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, request_id: str, task: Wanted) -> None:
        started = time.perf_counter()
        outcome: Way | Reason = Reason.LOST
        try:
            is_overlapped = task.hand_off.ahead
            outcome = (self._follower.follow if is_overlapped else self._reader.pull)(
                task.hand_off, task.prompt_digest, task.first_block, task.blocks
            )
        except RefusedError as refused:
            outcome = refused.reason
            _log.warning("KV of %s was not pulled: %s: %s", request_id, outcome, refused)
        except Exception:  # noqa: BLE001
            # Unexpected, but the request must not wait for ever.
            _log.exception("KV of %s was not pulled", request_id)
        finally:
            with self._lock:
                self._expected.pop(request_id, None)
            size = self._block_bytes * len(task.blocks)
            self._ended.put(_Ended(request_id, outcome, time.perf_counter() - started, size))

    def _beat(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            with self._lock:
                waiting = list(self._expected.values())
            if waiting:
                self._reader.beat(waiting)
