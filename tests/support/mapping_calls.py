"""Memory of the host in place of a GPU's: what `MappingCalls` maps crosses processes."""

import mmap
import threading
from collections import Counter
from typing import ClassVar

import msgspec
import numpy as np
import torch

from cleave_worker.transfer.memory import Memory
from cleave_worker.transfer.transport import LinkError
from cleave_worker.transfer.transports.cuda_ipc import ExportedRegion
from cleave_worker.transfer.transports.shared_memory import (
    SharedRegion,
    _map_region,
    share_memory,
)


class FakeMappingCalls:
    """Counts how often each allocation is open in this process, as the driver does."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    opened: ClassVar[Counter[bytes]] = Counter()
    maps: ClassVar[dict[bytes, tuple[int, mmap.mmap]]] = {}

    def export(self, region: torch.Tensor) -> ExportedRegion:
        (shared,) = share_memory(Memory([region]))
        return ExportedRegion(msgspec.msgpack.encode(shared), 0, region.numel())

    def open(self, handle: bytes) -> int:
        with self._lock:
            if not self.opened[handle]:
                try:
                    mapping = _map_region(msgspec.msgpack.decode(handle, type=SharedRegion))
                except OSError as error:
                    raise LinkError(f"cudaIpcOpenMemHandle returned error: {error}") from error
                self.maps[handle] = np.frombuffer(mapping, np.uint8).ctypes.data, mapping
            self.opened[handle] += 1
            return self.maps[handle][0]

    def close(self, address: int) -> None:
        with self._lock:
            (handle,) = [handle for handle, (at, _) in self.maps.items() if at == address]
            self.opened[handle] -= 1
            if not self.opened[handle]:
                self.maps.pop(handle)[1].close()


def find_fake_calls(device: torch.device) -> FakeMappingCalls:
    return FakeMappingCalls()


def refuse_export(calls: FakeMappingCalls, region: torch.Tensor) -> ExportedRegion:
    """As with expandable segments, in place of `export`."""
    raise LinkError("cudaIpcGetMemHandle returned error 1")
