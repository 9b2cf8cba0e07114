"""Moving a prompt's KV from its prefill to its decode instance: when, and what of it is waited for.

Used by the planner, which turns a `KvTransfer` into the simulator's. Three ways: serialised after
the prompt, per layer while the next layers are computed (Splitwise, section IV-C), and per chunk
while the next chunks are (TetriInfer, section 3.3.3).
"""

from dataclasses import dataclass

from cleave.perf.link import Link
from cleave.perf.model import ModelShape

_LAYER_SYNC_MS = 0.07
"""Semaphore and put of one layer. Splitwise (section VI-A) sees a constant 5 ms in per-layer
transfers on H100; that these are the 70 layers of BLOOM, whose KV fits the times of fig. 14 (under
7 % of the prompt's), is concluded here. On A100, with half the bandwidth, it is 8 ms."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The hand-off between two instances, by prompt tokens."""

    latency_ms: float
    """Before the first byte arrives."""
    token_ms: float
    """One token's KV over the busiest GPU's link."""
    num_layers: int
    """Sent one by one where the transfer is per layer."""
    compute_token_ms: float
    """One prompt token's computation, under which a transfer hides."""

    def serialised_ms(self, tokens: float) -> float:
        """All of it, after the prompt (Splitwise, fig. 11a)."""
        return self.latency_ms + tokens * self.token_ms

    def per_layer_ms(self, tokens: float) -> float:
        """What remains visible after the prompt (fig. 11b).

        Every layer waits for its synchronisation; the last layer's KV, and what the link could not
        move while the prompt ran, comes after it.
        """
        hidden = tokens * self.overlapped_token_ms
        return self.serialised_ms(tokens) - hidden + self.layered_latency_ms

    def per_chunk_ms(self, tokens: float, chunk_tokens: float) -> float:
        """What remains visible when each chunk leaves as the next one is computed."""
        last = min(tokens, chunk_tokens)
        late_token_ms = max(0.0, self.token_ms - self.compute_token_ms)
        return self.latency_ms + last * self.token_ms + (tokens - last) * late_token_ms

    @property
    def overlapped_token_ms(self) -> float:
        """Part of `token_ms` that a per-layer transfer hides: all layers but the last at most."""
        rate = min(self.token_ms, self.compute_token_ms)
        return rate * (self.num_layers - 1) / self.num_layers

    @property
    def layered_latency_ms(self) -> float:
        """What a per-layer transfer costs whatever the prompt."""
        return self.num_layers * _LAYER_SYNC_MS

    @property
    def overlap_from_tokens(self) -> int | None:
        """Prompt tokens from which per layer is the faster way; None: never.

        Splitwise measured 512 on H100 (section VI-A); for BLOOM over 8 + 8 GPUs with a 400 Gbit/s
        card each this says 357, for Llama-2-70B, whose KV is 12 times smaller, 4,985.
        """
        if not self.overlapped_token_ms:
            return None
        return int(self.layered_latency_ms / self.overlapped_token_ms) + 1


def kv_transfer(
    shape: ModelShape,
    link: Link,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    compute_token_ms: float,
) -> KvTransfer:
    """Between instances of (tensor, pipeline) sizes, whose GPUs move their shares in parallel.

    `link` is one GPU's: of the network between pods, of the node where processes that share GPU
    memory handles lie in one (DistServe, Algorithm 2). Decode GPUs pull what they keep, replicated
    heads included; the busiest GPU of either side sets the time. `compute_token_ms`: a prompt
    token's on the prefill instance.
    """
    pulled = shape.kv_bytes_on_gpu(*decode)
    decode_gpus, prefill_gpus = decode[0] * decode[1], prefill[0] * prefill[1]
    busiest = max(pulled, pulled * decode_gpus / prefill_gpus)
    token_ms = busiest / (link.effective_gb_per_s * 1e6)
    return KvTransfer(link.start_ms, token_ms, shape.num_layers, compute_token_ms)
