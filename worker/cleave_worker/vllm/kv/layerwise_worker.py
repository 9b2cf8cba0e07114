"""Announces to layerwise consumers which layers of which blocks a step has computed.

Called by the worker side of the connector within a step, so it must cost nothing without consumers.
On a GPU the step is only enqueued when vLLM reports a layer as done; an event recorded after the
layer's kernels marks its completion.
"""

from collections.abc import Mapping
from enum import StrEnum

import torch

from cleave_worker.transfer.block_leases import BlockLeases, ComputeEvent
from cleave_worker.transfer.progress import Progress
from cleave_worker.vllm.kv.metadata import ComputedChunk


class TransferGranularity(StrEnum):
    """How much KV is announced at a time; values are those of the setting `pace`."""

    PROMPT = "prompt"
    """The whole prompt, when it is computed."""
    CHUNK = "chunk"
    LAYER = "layer"


class LayerNotifier:
    """Announces the prefills of one rank, step by step."""

    def __init__(
        self, leases: BlockLeases, pace: TransferGranularity, device: torch.device
    ) -> None:
        self._leases = leases
        self._granularity = pace
        self._is_gpu = device.type != "cpu"
        self._chunks: Mapping[str, ComputedChunk] = {}
        self._num_layers_done = 0
        """Layers that the current step has finished."""

    def begin_step(self, chunks: Mapping[str, ComputedChunk]) -> None:
        """Begin a step; `chunks`: what it computes of registered prefills, by request id."""
        self._chunks = chunks
        self._num_layers_done = 0

    def finish_layer(self, position: int) -> None:
        """Announce a layer, by its index among the rank's layers (-1: unknown)."""
        # A layer out of order waits for the end of the step.
        if (
            not self._chunks
            or self._granularity is not TransferGranularity.LAYER
            or position != self._num_layers_done
        ):
            return
        self._num_layers_done += 1
        computed = self._record_event()
        for request_id, chunk in self._chunks.items():
            if chunk.num_final_after > chunk.num_final_before:
                progress = Progress(
                    chunk.num_final_before, chunk.num_final_after, self._num_layers_done
                )
                self._leases.update_progress(request_id, chunk.blocks, progress, computed)

    def finish_step(self) -> None:
        """Announce the chunks of the step as final."""
        if not self._chunks:
            return
        computed = self._record_event()
        for request_id, chunk in self._chunks.items():
            if chunk.is_last or self._granularity is not TransferGranularity.PROMPT:
                progress = Progress(chunk.num_final_after, chunk.num_final_after, 0)
                self._leases.update_progress(request_id, chunk.blocks, progress, computed)
        self._chunks = {}

    def _record_event(self) -> ComputeEvent | None:
        if not self._is_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        computed: ComputeEvent = event
        return computed
