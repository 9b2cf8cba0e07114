"""NIXL agents and transfer handles, with every NIXL error as a LinkError.

Used by `NixlLink` and `StagingBuffers`. NIXL cannot cancel a transfer. Releasing the handle of a
pending transfer returns at once, but the bytes still arrive later, so this module never does it.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch

from cleave_worker.transfer.memory import Memory
from cleave_worker.transfer.transport import LinkError

_UCX_CONFIG = "TLS=^tcp,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
"""UCX configuration, overridden by its environment variables (UCX_TLS, ...).

TCP is excluded: the producer's CPU would answer for a network card, and sometimes dies with a
consumer that dies meanwhile. UCX's default segments of 8 KiB halve the rate.
"""
_PROGRESS_DELAY_US = 10_000
"""Longest sleep of an agent's progress thread; incoming bytes wake it, too."""


def is_installed() -> bool:
    """Return whether NIXL can be imported, without importing it."""
    return importlib.util.find_spec("nixl") is not None


class XferDescriptor(NamedTuple):
    """A memory range as NIXL describes it."""

    address: int
    length: int
    device: int


class XferState(Enum):
    """State of a transfer."""

    IN_PROGRESS = "under way"
    DONE = "over"
    """All bytes have arrived and no more will."""
    FAILED = "failed"
    """Which bytes have arrived or may still arrive is unknown."""


class NixlAgent:
    """A NIXL agent of this process; several threads may use it."""

    def __init__(self, name: str, device: torch.device, *, use_progress_thread: bool) -> None:
        """Raises LinkError. `use_progress_thread`: for peers that read without an RDMA device."""
        with _raise_link_errors("NIXL does not work here"):
            self._nixl = _import_bindings()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = use_progress_thread
            # NIXL's own Python API sets 0, which keeps a core busy.
            config.pthrDelay = _PROGRESS_DELAY_US
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _UCX_CONFIG})
        on_host = device.type == "cpu"
        self._mem_type = self._nixl.DRAM_SEG if on_host else self._nixl.VRAM_SEG
        self._device = 0 if on_host else device.index or 0

    def register(self, memory: Memory) -> list[XferDescriptor]:
        """Register regions, which must live as long as the agent."""
        descriptors = [
            XferDescriptor(region.data_ptr(), region.numel(), self._device)
            for region in memory.regions
        ]
        unnamed = [(*descriptor, "") for descriptor in descriptors]
        with _raise_link_errors("memory cannot be registered"):
            self._agent.registerMem(self._nixl.nixlRegDList(self._mem_type, unnamed))
        return descriptors

    def get_metadata(self) -> bytes:
        """Return what other agents need to reach this agent's regions."""
        with _raise_link_errors("the agent has no metadata"):
            metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_remote_agent(self, metadata: bytes) -> str:
        """Load the metadata of a remote agent and return its name."""
        with _raise_link_errors("the remote agent cannot be added"):
            name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def remove_remote_agent(self, name: str) -> None:
        """Remove a remote agent if it is known. No transfer with it may be pending."""
        self._agent.invalidateRemoteMD(name)

    def read(
        self, name: str, local: Sequence[XferDescriptor], remote: Sequence[XferDescriptor]
    ) -> "XferHandle":
        """Start to copy from ranges of the remote agent to local ones."""
        lists = (self._nixl.nixlXferDList(self._mem_type, list(side)) for side in (local, remote))
        with _raise_link_errors("the peer's memory cannot be reached"):
            handle = self._agent.createXferReq(self._nixl.NIXL_READ, *lists, name)
        return XferHandle(self._agent, handle, self._nixl.NIXL_SUCCESS)


class XferHandle:
    """Handle of a transfer from its start on."""

    def __init__(self, agent: Any, handle: int, success: object) -> None:  # noqa: ANN401
        self._agent = agent
        self._handle = handle
        self._success = success
        self._state = XferState.IN_PROGRESS
        self._update(agent.postXferReq)

    def poll(self) -> XferState:
        """Return the state, after letting NIXL make progress."""
        if self._state is XferState.IN_PROGRESS:
            self._update(self._agent.getXferStatus)
        return self._state

    def _update(self, call: Any) -> None:  # noqa: ANN401
        try:
            if call(self._handle) != self._success:
                return
            self._state = XferState.DONE
        except Exception:  # noqa: BLE001
            # NIXL's exceptions share no base class and give no details.
            self._state = XferState.FAILED
        with suppress(Exception):
            self._agent.releaseXferReq(self._handle)


def _import_bindings() -> Any:  # noqa: ANN401
    # As vLLM sets it: otherwise UCX never frees registrations of short messages.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _bindings

    return _bindings


@contextmanager
def _raise_link_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NIXL's exceptions share no base class.
        raise LinkError(f"{what}: {error or type(error).__name__}") from error
