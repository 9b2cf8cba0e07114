"""Tells followers of prefills which layers of which blocks a step has made final.

Called by the workers' half of the connector from inside a step, so it must cost nothing when nobody
follows. What is hard: on a GPU the step is only queued when vLLM says that a layer is done; an
event behind the layer's work tells when it is.
"""

from collections.abc import Mapping
from enum import StrEnum

import torch

from cleave_worker.transfer.holds import Computed, Holds
from cleave_worker.transfer.progress import Progress
from cleave_worker.vllm.kv.orders import Chunk


class Pace(StrEnum):
    """What is announced at a time."""

    PROMPT = "prompt"
    """All of it, when it is computed."""
    CHUNK = "chunk"
    LAYER = "layer"


class Announcer:
    """One rank's, for one step after the other."""

    def __init__(self, holds: Holds, pace: Pace, device: torch.device) -> None:
        self._holds = holds
        self._pace = pace
        self._is_gpu = device.type != "cpu"
        self._chunks: Mapping[str, Chunk] = {}
        self._num_layers = 0
        """Of this step that are through."""

    def begin(self, chunks: Mapping[str, Chunk]) -> None:
        """A step begins."""
        self._chunks = chunks
        self._num_layers = 0

    def layer_done(self, plane: int) -> None:
        """A layer of the step is through; `plane`: where its KV lies."""
        # Layers that come in another order wait for the end of the step.
        if not self._chunks or self._pace is not Pace.LAYER or plane != self._num_layers:
            return
        self._num_layers += 1
        computed = self._record()
        for request_id, chunk in self._chunks.items():
            if chunk.num_final > chunk.num_before:
                progress = Progress(chunk.num_before, chunk.num_final, self._num_layers)
                self._holds.grow(request_id, chunk.blocks, progress, computed)

    def step_done(self) -> None:
        """All of the step is through."""
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
