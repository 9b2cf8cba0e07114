"""Changes of an EngineTiming: pipeline stages, scaling; and its prefill saturation.

Called by cleave.perf.estimator for every source of times.
"""

import math
from dataclasses import replace

from cleave.perf.hardware.link import Link
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.timing import EngineTiming

_SATURATION_SHARE = 0.9
_MEASURED_STAGES, _UNEVEN = 4, 0.23
"""Four stages of vLLM put out 23 % more once their decode batches are even (vllm-project/vllm, pull
request 57433, open: Kimi-K3, TP 8 x PP 4 of B200). Prompts: four stages of SGLang, which evens its
chunks, compute 3.31 times as much as one (DeepSeek-V3.1 on H20, quoted in vllm issue 41685)."""


def split_into_stages(
    timing: EngineTiming, shape: ModelShape, stages: int, link: Link
) -> EngineTiming:
    """Spread `timing`, which has one stage, over `stages` stages with `link` between them.

    All stages get the time of the one with the most layers: right for the rate, slightly too long
    for one request if the layers do not divide evenly. A hop carries the hidden state of the rows.
    """
    if stages == 1:
        return timing
    uneven = shape.count_layers_per_stage(stages) * stages / shape.num_layers
    row_bytes = shape.hidden_size * shape.dtype_bytes
    return replace(
        scale_timing(timing, prompt=uneven, decode=uneven),
        stages=stages,
        hop_ms=link.compute_send_ms(0),
        hop_token_ms=link.compute_send_ms(row_bytes) - link.compute_send_ms(0),
    )


def compute_stages_price(stages: int) -> float:
    """Factor on the iterations of today's engines in stages: their bubbles. No more than four were
    measured: fewer have the same price, as a margin, and more one that grows with their number."""
    return 1 + _UNEVEN * max(stages - 1, _MEASURED_STAGES - 1) / (_MEASURED_STAGES - 1)


def scale_timing(timing: EngineTiming, prompt: float = 1.0, decode: float = 1.0) -> EngineTiming:
    """`timing` with prefill and decode times multiplied by these factors."""
    if prompt == decode == 1.0:
        return timing
    return replace(
        timing,
        prompt_ms=tuple(ms * prompt for ms in timing.prompt_ms),
        prompt_square_ms=timing.prompt_square_ms * prompt,
        decode_ms=tuple(ms * decode for ms in timing.decode_ms),
        decode_context_ms=tuple(ms * decode for ms in timing.decode_context_ms),
        mixed_context_ms=tuple(ms * decode for ms in timing.mixed_context_ms),
    )


def find_prefill_saturation_tokens(timing: EngineTiming, max_model_len: int) -> int:
    """DistServe's L_m (section 3.1): the prompt length from which throughput hardly grows.

    The shortest length whose tokens per second are nine tenths of the maximum over all lengths up
    to `max_model_len`, rounded to a power of two. With the published fits of OPT-13B on an A100
    this is 512, as in the paper. At most `max_model_len`.
    """
    lengths = [min(16 * 2 ** (i / 8), max_model_len) for i in range(8 * 20)]
    times = [timing.predict_prefill_ms([max(round(tokens), 1)]) for tokens in lengths]
    speeds = [tokens / ms for tokens, ms in zip(lengths, times, strict=True)]
    enough = _SATURATION_SHARE * max(speeds)
    first = next(tokens for tokens, speed in zip(lengths, speeds, strict=True) if speed >= enough)
    nearest: int = 2 ** round(math.log2(first))
    return min(nearest, max_model_len)
