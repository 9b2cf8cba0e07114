"""Part e of one_gpu.py: what products, attention and reads of KV reach, beside the limits.

Shares are of the GPU's peak and bandwidth in Cleave's catalogue; on a CPU there are rates only.
"""

from collections.abc import Iterator

import torch
from copies import Row, Sizes, time_ms
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cleave.perf.hardware.gpu import Gpu

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


def measure_operators(device: torch.device, sizes: Sizes, gpu: Gpu | None) -> Iterator[Row]:
    """Rates of products by rows, of causal attention by length, of KV reads by batch."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side = sizes.matrix
    weights = torch.randn(side, side, dtype=dtype, device=device)
    for rows in (1, 64, 1_024, side):
        state = torch.randn(rows, side, dtype=dtype, device=device)
        ms = time_ms(device, sizes.rounds, lambda state=state: state @ weights)
        bytes_read, flops = weights.numel() * weights.element_size(), 2 * rows * side * side
        if rows <= 64:
            yield of_limit(f"product of {rows} rows: weights", bytes_read / ms / 1e6, "GB/s", gpu)
        else:
            yield of_limit(f"product of {rows} rows", flops / ms / 1e9, "TFLOP/s", gpu)
    for tokens in sizes.prompts:
        ms, name = time_attention(device, dtype, tokens, sizes.rounds)
        flops = 2 * 2 * HEADS * HEAD_SIZE * tokens * tokens / 2
        yield of_limit(
            f"causal attention, {tokens} tokens, {name}", flops / ms / 1e9, "TFLOP/s", gpu
        )
    for batch in (1, 64):
        length = sizes.tokens // 4
        keys, values = (
            torch.randn(batch, KV_HEADS, length, HEAD_SIZE, dtype=dtype, device=device)
            for _ in range(2)
        )
        query = torch.randn(batch, HEADS, 1, HEAD_SIZE, dtype=dtype, device=device)

        def decode(
            query: torch.Tensor = query, keys: torch.Tensor = keys, values: torch.Tensor = values
        ) -> None:
            functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        ms = time_ms(device, sizes.rounds, decode)
        size = 2 * keys.numel() * keys.element_size()
        yield of_limit(f"reads of KV, {batch} x {length} tokens", size / ms / 1e6, "GB/s", gpu)


def time_attention(
    device: torch.device, dtype: torch.dtype, tokens: int, rounds: int
) -> tuple[float, str]:
    """The fastest of torch's kernels that run here, in ms, and its name."""
    query, keys, values = (
        torch.randn(1, HEADS, tokens, HEAD_SIZE, dtype=dtype, device=device) for _ in range(3)
    )
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends.append(SDPBackend.CUDNN_ATTENTION)

    def attend() -> None:
        functional.scaled_dot_product_attention(query, keys, values, is_causal=True)

    found = []
    for backend in backends:
        with sdpa_kernel(backend):
            try:
                found.append((time_ms(device, rounds, attend), backend.name.lower()))
            except RuntimeError:
                continue  # This kernel does not run on this GPU.
    return min(found)


def of_limit(what: str, rate: float, unit: str, gpu: Gpu | None) -> Row:
    """A row with the share of the GPU's limit."""
    if gpu is None:
        return Row("e", what, rate, unit)
    limit = gpu.memory_gbps if unit == "GB/s" else gpu.dense_tflops
    return Row("e", what, rate, unit, f"{rate / limit:.0%} of {limit:,.0f}")
