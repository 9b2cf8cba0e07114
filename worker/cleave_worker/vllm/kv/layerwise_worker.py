"""Announces to layerwise consumers which layers of which blocks a step has computed.

Called by the worker side of the connector within a step, so it must cost nothing without consumers.
What is hard: on a GPU the step is only enqueued when vLLM reports a layer as done; an event
recorded after the layer's kernels tells when it really is.
"""

from collections.abc import Mapping
from enum import StrEnum

import torch

from cleave_worker.transfer.block_leases import Computed, Holds
from cleave_worker.transfer.progress import Progress
from cleave_worker.vllm.kv.metadata import Chunk


class Pace(StrEnum):
    """How much KV is announced at a time; values are those of the setting `pace`."""

    PROMPT = "prompt"
    """The whole prompt, when it is computed."""
    CHUNK = "chunk"
    LAYER = "layer"


class Announcer:
    """Announces the prefills of one rank, step by step."""

    def __init__(self, leases: Holds, pace: Pace, device: torch.device) -> None:
        self._holds = leases
        self._pace = pace
        self._is_gpu = device.type != "cpu"
        self._chunks: Mapping[str, Chunk] = {}
        self._num_layers = 0
        """Layers that the current step has finished."""

    def begin(self, chunks: Mapping[str, Chunk]) -> None:
        """Begin a step; `chunks`: what it computes of registered prefills, by request id."""
        self._chunks = chunks
        self._num_layers = 0

    def layer_done(self, position: int) -> None:
        """Announce a layer, by its index among the rank's layers (-1: unknown)."""
        # A layer out of order waits for the end of the step.
        if not self._chunks or self._pace is not Pace.LAYER or position != self._num_layers:
            return
        self._num_layers += 1
        computed = self._record()
        for request_id, chunk in self._chunks.items():
            if chunk.num_final > chunk.num_before:
                progress = Progress(chunk.num_before, chunk.num_final, self._num_layers)
                self._holds.grow(request_id, chunk.blocks, progress, computed)

    def step_done(self) -> None:
        """Announce the chunks of the step as final."""
        if not self._chunks:
            return
        computed = self._record()
        for request_id, chunk in self._chunks.items():
            if chunk.is_last or self._pace is not Pace.PROMPT:
                progress = Progress(chunk.num_final, chunk.num_final, 0)
                self._holds.grow(request_id, chunk.blocks, progress, computed)
        self._chunks = {}

    def _record(self) -> Computed | None:
        if not self._is_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        computed: Computed = event
        return computed
