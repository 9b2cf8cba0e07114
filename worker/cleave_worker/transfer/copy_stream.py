"""The CUDA stream on which a thread of this package copies KV; nothing to do on the host.

Called by the threads of `KvServer` and `WorkerSide`. A new thread has device 0 and the default
stream, also on rank 3, and the model may run on that stream: a copy there would queue behind whole
steps. Copies are asynchronous, so a thread must wait before it reports KV or reuses a buffer.

Each thread has a stream that nothing else has (`cuda_stream`) as long as it lives: torch's 32
streams per GPU are handed out in turn, so the 33rd user would share one with another transfer or
with the model. A thread that may never copy selects its device only, and a stream when it copies
first. Threads are bounded by their pools and the server's connections, and so are streams.
"""

import threading
from collections import deque
from typing import ClassVar

import torch

from cleave_worker.transfer.transports.cuda_stream import create_stream

_of_thread = threading.local()
"""`stream`: the ThreadStream of a thread that copies on a GPU."""


class ThreadStream:
    """A stream of one thread. It is kept for another thread when its owner ends, as its
    thread-local values are deleted then: the number of streams is the most threads at a time."""

    _unused: ClassVar[dict[torch.device, deque[torch.cuda.Stream]]] = {}

    def __init__(self, device: torch.device) -> None:
        """Raises LinkError."""
        self._others = self._unused.setdefault(device, deque())
        try:
            self.stream = self._others.pop()
        except IndexError:
            self.stream = create_stream(device)

    def __del__(self) -> None:
        """Keep the stream; copies of the next thread come after what is still enqueued."""
        if hasattr(self, "stream"):
            self._others.append(self.stream)


def select_device(device: torch.device) -> None:
    """Give the calling thread this device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def select_copy_stream(device: torch.device) -> None:
    """Give the calling thread this device, and a stream of its own for all that it enqueues; a
    thread that has one keeps it. Raises LinkError."""
    if device.type != "cuda":
        return
    select_device(device)
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = ThreadStream(device)
        torch.cuda.set_stream(_of_thread.stream.stream)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what the thread has enqueued; None on the host, where nothing waits.

    Waiting for it sleeps: an event without `blocking` keeps a core busy, and a pod has few.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def wait_for_copies(device: torch.device) -> None:
    """Block until all that the thread has enqueued is done."""
    if (event := record_event(device)) is not None:
        event.synchronize()
