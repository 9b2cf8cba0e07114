"""The same pulls with NIXL, as vLLM's own connector makes them: the usual way, beside ours.

Used by run.py where NIXL is installed. Every block of every layer is described once on both sides;
a pull names blocks by number and reads them without the owner's help.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from cleave_worker.transfer.server import RegisteredKv

_BOUND_S = 120.0
_DEVICE = 0


class Side:
    """One process's agent, with its memory registered."""

    def __init__(self, registered: RegisteredKv) -> None:
        self._name = registered.boot_id
        self._agent = nixl_agent(self._name, nixl_agent_config())
        regions = [(one.data_ptr(), one.numel(), _DEVICE, "") for one in registered.memory.regions]
        self._agent.register_memory(self._agent.get_reg_descs(regions, "DRAM"))
        self._blocks = _describe(registered)
        self._num_blocks = len(self._blocks) // len(registered.layers)

    @property
    def descriptor(self) -> tuple[str, bytes, Any]:
        """What the other side needs to read from this one."""
        return self._name, self._agent.get_agent_metadata(), self._blocks

    def meet(self, descriptor: tuple[str, bytes, Any]) -> None:
        """Describe both sides' blocks."""
        name, metadata, blocks = descriptor
        self._peer = self._agent.add_remote_agent(metadata)
        self._own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._blocks, "DRAM")
        self._theirs = self._agent.prep_xfer_dlist(name, blocks, "DRAM")

    def pull(self, theirs: Sequence[int]) -> float:
        """Seconds that it takes to read these blocks of every layer into own ones, in order."""
        own = sorted(theirs)
        begun = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ", self._own, self._of_all_layers(own), self._theirs, self._of_all_layers(theirs)
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            assert time.perf_counter() - begun < _BOUND_S, "NIXL stands still"
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        seconds = time.perf_counter() - begun
        self._agent.release_xfer_handle(handle)
        return seconds

    def _of_all_layers(self, blocks: Sequence[int]) -> Any:
        layers = np.arange(0, len(self._blocks), self._num_blocks)
        return (layers[:, None] + np.asarray(blocks)[None, :]).ravel()


def _describe(registered: RegisteredKv) -> Any:
    """Address, length and device of every block, layer by layer."""
    found = []
    for plane in registered.layers:
        region = registered.memory.regions[plane.region]
        starts = np.arange(
            region.data_ptr() + plane.offset, region.data_ptr() + region.numel(), plane.stride
        )
        found.append(
            np.stack(
                [starts, np.full_like(starts, plane.block_bytes), np.full_like(starts, _DEVICE)],
                axis=1,
            )
        )
    return np.concatenate(found)
