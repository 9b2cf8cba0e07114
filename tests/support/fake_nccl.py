"""NCCL between two threads of a test, with the faults that a peer on a GPU can have.

As on a GPU a message is copied by the "kernel" from buffer to buffer when both ends have enqueued
it; an abort ends kernels, which then count as completed, also with bytes missing.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from cleave_worker.transfer.transport import LinkError
from cleave_worker.transfer.transports.nccl import NcclResult

_REMOTE_ERROR = 6
_GARBAGE = 0xEE


class Fault(Enum):
    """What the producer's end does wrong."""

    NEVER_JOINS = auto()
    """Its communicator is never complete, as of a process that stalls."""
    HANGS = auto()
    """Its kernel never sends, as of a process that stalls in a transfer."""
    LATE = auto()
    """It sends when the other end has given up, and before that end's abort is done."""
    RAISES = auto()
    """NCCL returns an error for the call."""
    DIES = auto()
    """NCCL reports the loss of the peer; the kernel wrote a part of the message."""
    ABORTS = auto()
    """Its abort ends the kernel of the other end, which counts as completed without an error."""
    ABORT_HANGS = auto()
    """As HANGS, and the aborts of both ends never return."""
    ABORT_RAISES = auto()
    """As HANGS, and the aborts of both ends return an error."""


_FAULTS_WITHOUT_A_MESSAGE = (Fault.HANGS, Fault.LATE, Fault.ABORT_HANGS, Fault.ABORT_RAISES)


@dataclass(eq=False)
class _Kernel:
    message: torch.Tensor
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done


@dataclass
class _Meeting:
    ranks: set[int] = field(default_factory=set)
    kernels: dict[int, list[_Kernel]] = field(default_factory=lambda: {0: [], 1: []})
    state: int = NcclResult.SUCCESS


class FakeNccl:
    """The machines' NCCL; `fault` holds for links that are opened from then on."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.free_bytes = 80 << 30
        self.num_communicators = 0
        self.most_communicators = 0
        self.release_aborts = threading.Event()
        self._ids = itertools.count(1)
        self._meetings: dict[bytes, _Meeting] = {}
        self._lock = threading.Lock()

    def load(self, device: torch.device) -> "_FakeApi":
        return _FakeApi(self)

    def meet(self, unique_id: bytes, rank: int) -> _Meeting:
        with self._lock:
            self.num_communicators += 1
            self.most_communicators = max(self.most_communicators, self.num_communicators)
            meeting = self._meetings.setdefault(unique_id, _Meeting())
            meeting.ranks.add(rank)
            return meeting

    def create_id(self) -> bytes:
        return next(self._ids).to_bytes(128, "big")

    def run(self, do: Callable[[], None]) -> None:
        with self._lock:
            do()

    def end_communicator(self) -> None:
        with self._lock:
            self.num_communicators -= 1


class _FakeApi:
    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self._fault = nccl.fault
        self._rank = -1
        self._meeting = _Meeting()
        self._last: _Kernel | None = None

    def create_id(self) -> bytes:
        return self._nccl.create_id()

    def get_free_bytes(self) -> int:
        return self._nccl.free_bytes

    def begin_init(self, unique_id: bytes, rank: int) -> int:
        self._rank = rank
        self._meeting = self._nccl.meet(unique_id, rank)
        return 1

    def get_state(self, communicator: int) -> int:
        if len(self._meeting.ranks) < 2 or self._fault is Fault.NEVER_JOINS:
            return NcclResult.IN_PROGRESS
        return self._meeting.state

    def send(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        if self._fault is Fault.RAISES:
            raise LinkError("ncclSend returned error 3")
        self._enqueue(message)

    def receive(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        self._enqueue(message)

    def record(self) -> _Kernel:
        assert self._last
        return self._last

    def abort(self, communicator: int) -> None:
        if self._fault is Fault.ABORT_HANGS:
            self._nccl.release_aborts.wait()
        if self._fault is Fault.ABORT_RAISES:
            self._nccl.end_communicator()
            raise LinkError("ncclCommAbort returned error 1")
        self._nccl.run(self._end_kernels)
        self._nccl.end_communicator()

    def _enqueue(self, message: torch.Tensor) -> None:
        self._last = _Kernel(message)
        self._meeting.kernels[self._rank].append(self._last)
        self._nccl.run(self._match)

    def _match(self) -> None:
        sent, received = self._meeting.kernels[0], self._meeting.kernels[1]
        while sent and received:
            if self._fault in _FAULTS_WITHOUT_A_MESSAGE:
                return
            if self._fault in (Fault.DIES, Fault.ABORTS):
                received[0].message[: received[0].message.numel() // 2] = _GARBAGE
                if self._fault is Fault.DIES:
                    self._meeting.state = _REMOTE_ERROR
                received.pop(0).is_done = True
                return
            self._copy(sent.pop(0), received.pop(0))

    def _end_kernels(self) -> None:
        sent, received = self._meeting.kernels[0], self._meeting.kernels[1]
        if self._fault is Fault.LATE and sent and received:
            self._copy(sent.pop(0), received.pop(0))
        for kernel in (*sent, *received):
            kernel.is_done = True
        self._meeting.state = _REMOTE_ERROR

    @staticmethod
    def _copy(sent: _Kernel, received: _Kernel) -> None:
        length = min(sent.message.numel(), received.message.numel())
        received.message[:length] = sent.message[:length]
        sent.is_done = received.is_done = True
