"""NIXL's agents as links use them, and what is known of a transfer that was begun.

Used by nixl.py and arrivals.py; whatever NIXL raises is a LinkError here. What is hard: NIXL has no
end for a transfer but its own. Releasing the handle of one that is under way gives the handle back
at once, and the bytes come later all the same, so that is never done.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch

from cleave_worker.transfer.link import LinkError
from cleave_worker.transfer.memory import Memory

_ENGINE = "TLS=^tcp,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
"""Of UCX, where its environment (UCX_TLS, ...) says nothing. Over TCP the owner's processor answers
for a card, and dies now and then of a reader that dies while it is answered; UCX's own segments of
8 KiB halve the rate."""
_WAKE_US = 10_000
"""Longest sleep of an answering agent's thread; bytes wake it as well."""


def installed() -> bool:
    """Whether NIXL can be imported; does not."""
    return importlib.util.find_spec("nixl") is not None


class Spot(NamedTuple):
    """Bytes as NIXL names them."""

    address: int
    length: int
    device: int


class State(Enum):
    """Of a transfer."""

    UNDER_WAY = "under way"
    OVER = "over"
    """All bytes are where they belong, and no more will come."""
    FAILED = "failed"
    """Nobody knows what has come and what still will."""


class Agent:
    """One of this process, for several threads."""

    def __init__(self, name: str, device: torch.device, *, answers: bool) -> None:
        """`answers`: peers reach into its memory, where no network card does it by itself.

        Raises LinkError.
        """
        with _as_link_error("no NIXL here"):
            self._nixl = _bindings()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = answers
            # NIXL's own Python door has 0, which keeps a core busy for nothing.
            config.pthrDelay = _WAKE_US
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _ENGINE})
        on_host = device.type == "cpu"
        self._kind = self._nixl.DRAM_SEG if on_host else self._nixl.VRAM_SEG
        self._device = 0 if on_host else device.index or 0

    def register(self, memory: Memory) -> list[Spot]:
        """Let NIXL move bytes of these regions, which must live as long as the agent."""
        spots = [Spot(region.data_ptr(), region.numel(), self._device) for region in memory.regions]
        with _as_link_error("memory cannot be registered"):
            self._agent.registerMem(
                self._nixl.nixlRegDList(self._kind, [(*spot, "") for spot in spots])
            )
        return spots

    def metadata(self) -> bytes:
        """What other agents need to reach this one's regions."""
        with _as_link_error("the agent does not describe itself"):
            told: bytes = self._agent.getLocalMD()
        return told

    def meet(self, metadata: bytes) -> str:
        """Know another agent from now on; its name."""
        with _as_link_error("the peer's agent cannot be met"):
            name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def part(self, name: str) -> None:
        """Forget another agent, which may be forgotten already. Nothing may be under way."""
        self._agent.invalidateRemoteMD(name)

    def read(self, name: str, here: Sequence[Spot], there: Sequence[Spot]) -> "Flight":
        """Begin to copy from spots of the other agent to own ones."""
        return self._begin(self._nixl.NIXL_READ, name, here, there)

    def write(self, name: str, here: Sequence[Spot], there: Sequence[Spot]) -> "Flight":
        """Begin to copy the other way."""
        return self._begin(self._nixl.NIXL_WRITE, name, here, there)

    def _begin(
        self, what: object, name: str, here: Sequence[Spot], there: Sequence[Spot]
    ) -> "Flight":
        told = (self._nixl.nixlXferDList(self._kind, list(spots)) for spots in (here, there))
        with _as_link_error("the peer's memory is not there"):
            handle = self._agent.createXferReq(what, *told, name)
        return Flight(self._agent, handle, self._nixl.NIXL_SUCCESS)


class Flight:
    """A transfer from its beginning."""

    def __init__(self, agent: Any, handle: int, success: object) -> None:  # noqa: ANN401
        self._agent = agent
        self._handle = handle
        self._success = success
        self._state = State.UNDER_WAY
        self._note(agent.postXferReq)

    def look(self) -> State:
        """How it is; also moves it on."""
        if self._state is State.UNDER_WAY:
            self._note(self._agent.getXferStatus)
        return self._state

    def _note(self, ask: Any) -> None:  # noqa: ANN401
        try:
            if ask(self._handle) != self._success:
                return
            self._state = State.OVER
        except Exception:  # noqa: BLE001
            # NIXL's errors have nothing in common, and tell no more than that.
            self._state = State.FAILED
        with suppress(Exception):
            self._agent.releaseXferReq(self._handle)


def _bindings() -> Any:  # noqa: ANN401
    # As vLLM has it: without, UCX keeps what was registered for short messages for ever.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _bindings

    return _bindings


@contextmanager
def _as_link_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NIXL's errors have nothing in common.
        raise LinkError(f"{what}: {error or type(error).__name__}") from error
