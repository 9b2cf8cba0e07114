"""NIXL agents and transfer handles, with every NIXL error as a LinkError.

Used by `Nixl` and `Arrivals`. What is hard: NIXL cannot cancel a transfer. Releasing the handle of
a pending transfer returns at once, but the bytes still arrive later, so that is never done.
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

_ENGINE = "TLS=^tcp,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
"""UCX configuration, overridden by its environment variables (UCX_TLS, ...).

TCP is excluded: the producer's CPU would answer for a network card, and sometimes dies with a
consumer that dies meanwhile. UCX's default segments of 8 KiB halve the rate.
"""
_WAKE_US = 10_000
"""Longest sleep of an agent's progress thread; incoming bytes wake it, too."""


def installed() -> bool:
    """Return whether NIXL can be imported, without importing it."""
    return importlib.util.find_spec("nixl") is not None


class Spot(NamedTuple):
    """A memory range as NIXL describes it."""

    address: int
    length: int
    device: int


class State(Enum):
    """State of a transfer."""

    UNDER_WAY = "under way"
    OVER = "over"
    """All bytes have arrived and no more will."""
    FAILED = "failed"
    """Which bytes have arrived or may still arrive is unknown."""


class Agent:
    """A NIXL agent of this process; several threads may use it."""

    def __init__(self, name: str, device: torch.device, *, answers: bool) -> None:
        """`answers`: run a progress thread, for peers that read this memory without an RDMA device.

        Raises LinkError.
        """
        with _as_link_error("NIXL does not work here"):
            self._nixl = _bindings()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = answers
            # NIXL's own Python API sets 0, which keeps a core busy.
            config.pthrDelay = _WAKE_US
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _ENGINE})
        on_host = device.type == "cpu"
        self._kind = self._nixl.DRAM_SEG if on_host else self._nixl.VRAM_SEG
        self._device = 0 if on_host else device.index or 0

    def register(self, memory: Memory) -> list[Spot]:
        """Register regions, which must live as long as the agent."""
        descriptors = [
            Spot(region.data_ptr(), region.numel(), self._device) for region in memory.regions
        ]
        with _as_link_error("memory cannot be registered"):
            self._agent.registerMem(
                self._nixl.nixlRegDList(
                    self._kind, [(*descriptor, "") for descriptor in descriptors]
                )
            )
        return descriptors

    def metadata(self) -> bytes:
        """Return what other agents need to reach this agent's regions."""
        with _as_link_error("the agent has no metadata"):
            metadata: bytes = self._agent.getLocalMD()
        return metadata

    def meet(self, metadata: bytes) -> str:
        """Load the metadata of a remote agent and return its name."""
        with _as_link_error("the remote agent cannot be added"):
            name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def part(self, name: str) -> None:
        """Remove a remote agent if it is known. No transfer with it may be pending."""
        self._agent.invalidateRemoteMD(name)

    def read(self, name: str, local: Sequence[Spot], remote: Sequence[Spot]) -> "Flight":
        """Start to copy from ranges of the remote agent to local ones."""
        return self._begin(self._nixl.NIXL_READ, name, local, remote)

    def write(self, name: str, local: Sequence[Spot], remote: Sequence[Spot]) -> "Flight":
        """Start to copy from local ranges to those of the remote agent."""
        return self._begin(self._nixl.NIXL_WRITE, name, local, remote)

    def _begin(
        self, operation: object, name: str, local: Sequence[Spot], remote: Sequence[Spot]
    ) -> "Flight":
        lists = (
            self._nixl.nixlXferDList(self._kind, list(descriptors))
            for descriptors in (local, remote)
        )
        with _as_link_error("the peer's memory cannot be reached"):
            handle = self._agent.createXferReq(operation, *lists, name)
        return Flight(self._agent, handle, self._nixl.NIXL_SUCCESS)


class Flight:
    """Handle of a transfer from its start on."""

    def __init__(self, agent: Any, handle: int, success: object) -> None:  # noqa: ANN401
        self._agent = agent
        self._handle = handle
        self._success = success
        self._state = State.UNDER_WAY
        self._note(agent.postXferReq)

    def look(self) -> State:
        """Return the state, after letting NIXL make progress."""
        if self._state is State.UNDER_WAY:
            self._note(self._agent.getXferStatus)
        return self._state

    def _note(self, call: Any) -> None:  # noqa: ANN401
        try:
            if call(self._handle) != self._success:
                return
            self._state = State.OVER
        except Exception:  # noqa: BLE001
            # NIXL's exceptions share no base class and give no details.
            self._state = State.FAILED
        with suppress(Exception):
            self._agent.releaseXferReq(self._handle)


def _bindings() -> Any:  # noqa: ANN401
    # As vLLM sets it: otherwise UCX never frees registrations of short messages.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _bindings

    return _bindings


@contextmanager
def _as_link_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NIXL's exceptions share no base class.
        raise LinkError(f"{what}: {error or type(error).__name__}") from error
