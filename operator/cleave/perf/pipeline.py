"""Cutting the passes of a whole model into pipeline stages, and what follows from its passes.

Called by cleave.perf.estimator for every source of times.
"""

import math
from dataclasses import replace

from cleave.perf.link import Link
from cleave.perf.model import ModelShape
from cleave.perf.timing import Timing

_NEAR_THE_BEST = 0.9


def cut(timing: Timing, shape: ModelShape, stages: int, link: Link) -> Timing:
    """`timing` of the whole model on one stage, spread over `stages` with `link` between them.

    Stages count as equal. Where the layers do not divide evenly, each is as slow as the fullest:
    right for the rate, a little long for one request. A hop carries the hidden state of the rows.
    """
    if stages == 1:
        return timing
    uneven = shape.layers_per_stage(stages) * stages / shape.num_layers
    row_bytes = shape.hidden_size * shape.dtype_bytes
    return replace(
        scaled(timing, prompt=uneven, decode=uneven),
        stages=stages,
        hop_ms=link.send_ms(0),
        hop_token_ms=link.send_ms(row_bytes) - link.send_ms(0),
    )


def scaled(timing: Timing, prompt: float = 1.0, decode: float = 1.0) -> Timing:
    """Both phases times a factor."""
    return replace(
        timing,
        prompt_ms=tuple(ms * prompt for ms in timing.prompt_ms),
        prompt_square_ms=timing.prompt_square_ms * prompt,
        decode_ms=tuple(ms * decode for ms in timing.decode_ms),
        decode_context_ms=tuple(ms * decode for ms in timing.decode_context_ms),
    )


def prefill_saturation_tokens(timing: Timing, max_model_len: int) -> int:
    """DistServe's L_m (section 3.1): the prompt from which longer ones add time, not speed.

    The shortest power of two, to the nearest, at which a pass makes nine tenths of the tokens per
    second that any length up to `max_model_len` makes. With the published fits of OPT-13B on an
    A100 this is 512, as in the paper. Never more than `max_model_len`.
    """
    lengths = [min(16 * 2 ** (i / 8), max_model_len) for i in range(8 * 20)]
    speeds = [tokens / _prompt_ms(timing, tokens) for tokens in lengths]
    enough = _NEAR_THE_BEST * max(speeds)
    first = next(tokens for tokens, speed in zip(lengths, speeds, strict=True) if speed >= enough)
    nearest: int = 2 ** round(math.log2(first))
    return min(nearest, max_model_len)


def _prompt_ms(timing: Timing, tokens: float) -> float:
    return timing.prefill_ms([max(round(tokens), 1)])
