"""Messages between two processes over gloo: TCP, through host memory. Used by `TwoSidedLink`."""

from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo, Store

from cleave_worker.transfer.transport import LinkError, PendingMessage

_TAG = 7


class GlooChannel:
    """A `MessageChannel` over a process group of two."""

    device = torch.device("cpu")

    def __init__(self, store: Store, rank: int, host: str, seconds: float) -> None:
        """Raises RuntimeError when the peer does not come within `seconds`."""
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, 2, options)
        # The group keeps only the C++ part of the store alive.
        self._store = store
        self._peer = 1 - rank

    def send(self, message: torch.Tensor) -> PendingMessage:
        """Start to send."""
        return _GlooMessage(self._require_group().send([message], self._peer, _TAG))

    def receive(self, message: torch.Tensor) -> PendingMessage:
        """Start to receive."""
        return _GlooMessage(self._require_group().recv([message], self._peer, _TAG))

    def abort(self) -> None:
        """Destroy the group as soon as no message uses it; pending ones fail at both ends."""
        self._group = None

    def _require_group(self) -> ProcessGroupGloo:
        if self._group is None:
            raise LinkError("the link is closed")
        return self._group


class _GlooMessage:
    def __init__(self, work: torch.distributed.Work) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        """Raises RuntimeError after `seconds`."""
        self._work.wait(timedelta(seconds=seconds))
