"""Time to move a prompt's KV from its prefill to its decode instance, and how much of it is hidden.

Used by the planner, which converts a `KvTransferModel` for the simulator. Three modes: serialised
after the prompt, per layer while the next layers are computed (Splitwise, section IV-C), and per
chunk while the next chunks are computed (TetriInfer, section 3.3.3).
"""

from dataclasses import dataclass

from cleave.perf.hardware.link import Link
from cleave.perf.model.model_shape import ModelShape

_LAYER_SYNC_MS = 0.07
"""Semaphore and put of one layer. Splitwise (section VI-A) measures a constant 5 ms for per-layer
transfers on H100; dividing it by the 70 layers of BLOOM is our conclusion, because BLOOM's KV fits
the times of fig. 14 (under 7 % of the prompt's). On A100, with half the bandwidth, it is 8 ms."""


@dataclass(frozen=True, slots=True)
class KvTransferModel:
    """The KV transfer between two instances, as a function of the prompt tokens."""

    latency_ms: float
    """Time before the first byte arrives."""
    token_ms: float
    """Time for one token's KV over the link of the busiest GPU."""
    num_layers: int
    """Number of messages of a per-layer transfer."""
    compute_token_ms: float
    """Time to compute one prompt token, which can hide the transfer."""

    def compute_serialized_ms(self, tokens: float) -> float:
        """The whole transfer, after the prompt (Splitwise, fig. 11a)."""
        return self.latency_ms + tokens * self.token_ms

    def compute_per_layer_ms(self, tokens: float) -> float:
        """Time after the prompt of a per-layer transfer (fig. 11b).

        It consists of the synchronisation of every layer, the KV of the last layer, and the KV that
        the link could not move while the prompt was computed.
        """
        hidden = tokens * self.overlapped_token_ms
        return self.compute_serialized_ms(tokens) - hidden + self.layered_latency_ms

    def compute_per_chunk_ms(self, tokens: float, chunk_tokens: float) -> float:
        """Time after the prompt if each chunk is sent while the next one is computed."""
        last = min(tokens, chunk_tokens)
        late_token_ms = max(0.0, self.token_ms - self.compute_token_ms)
        return self.latency_ms + last * self.token_ms + (tokens - last) * late_token_ms

    @property
    def overlapped_token_ms(self) -> float:
        """Part of `token_ms` that a per-layer transfer hides: at most all layers but the last."""
        return min(self.token_ms, self.compute_token_ms) * (self.num_layers - 1) / self.num_layers

    @property
    def layered_latency_ms(self) -> float:
        """Fixed cost of a per-layer transfer, for any prompt."""
        return self.num_layers * _LAYER_SYNC_MS

    @property
    def overlap_from_tokens(self) -> int | None:
        """Prompt tokens from which a per-layer transfer is faster; None: never.

        Splitwise measured 512 on H100 (section VI-A); this model gives 357 for BLOOM over 8 + 8
        GPUs with a 400 Gbit/s card each, and 4,985 for Llama-2-70B, whose KV is 12 times smaller.
        """
        if not self.overlapped_token_ms:
            return None
        return int(self.layered_latency_ms / self.overlapped_token_ms) + 1


def build_kv_transfer(
    shape: ModelShape,
    link: Link,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    compute_token_ms: float,
) -> KvTransferModel:
    """The transfer between instances of (tensor, pipeline) sizes; GPUs move shares in parallel.

    `link`: one GPU's, that of the network between pods; that of the node only for processes in one
    node that share GPU memory handles (DistServe, Algorithm 2). Each decode GPU pulls the KV that
    it stores, replicated heads included; the busiest GPU of either side determines the time. States
    go with every prompt of any length, and so do full windows of layers with heads of their own;
    other windows count as whole contexts.
    `compute_token_ms`: time per prompt token on the prefill instance.
    """
    pulled = shape.compute_kv_bytes_on_gpu(*decode)
    decode_gpus, prefill_gpus = decode[0] * decode[1], prefill[0] * prefill[1]
    busiest = max(1.0, decode_gpus / prefill_gpus) / (link.effective_gb_per_s * 1e6)
    states_ms = shape.compute_bounded_bytes(decode[0]) / decode[1] * busiest
    latency_ms = link.start_ms + states_ms
    return KvTransferModel(latency_ms, pulled * busiest, shape.num_layers, compute_token_ms)
