"""Measured profiles for tests, made from a published fit."""

import random

from cleave.perf import named_profiles
from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    DecodePoint,
    LinearPoint,
    MeasuredProfile,
    MixedPoint,
    Operators,
    PrefillAttentionPoint,
    PrefillPoint,
)
from cleave.perf.timing import PromptChunk

TRUTH = named_profiles.load_profile("distserve/opt-13b/tp1").timing
PROMPTS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def from_fit(noise: float = 0.0, **header: object) -> MeasuredProfile:
    """OPT-13B by DistServe's fit, each point with a normal error of relative size `noise`."""
    draw = random.Random(7)

    def measure(ms: float) -> float:
        return ms * (1 + draw.gauss(0, noise)) if noise else ms

    prefill = [PrefillPoint(tokens=n, ms=measure(TRUTH.predict_prefill_ms([n]))) for n in PROMPTS]
    prefill += [
        PrefillPoint(prompts=n, tokens=256, ms=measure(TRUTH.predict_prefill_ms([256] * n)))
        for n in (2, 4)
    ]
    decode = [
        DecodePoint(batch=b, context_tokens=b * c, ms=measure(TRUTH.predict_decode_ms(b, b * c)))
        for b in BATCHES
        for c in (64, 256, 1024)
    ]
    mixed = MixedPoint(
        prompt_tokens=512,
        batch=8,
        context_tokens=2048,
        ms=measure(TRUTH.predict_iteration_ms([PromptChunk(0, 512)], 8, 2048)),
    )
    fields: dict[str, object] = {
        "model": "facebook/opt-13b",
        "device": "A100-SXM-80GB",
        "engine": "vllm",
        "measured_at": "2026-11-21",
        "software": {"vllm": "0.32.0"},
        "kv_capacity_tokens": 60_000,
        "prefill": tuple(prefill),
        "decode": tuple(decode),
        "mixed": (mixed,),
        **header,
    }
    return MeasuredProfile(**fields)


def operators(**parts: object) -> Operators:
    """Operators of two layers with round numbers; tensor parallel sizes 1 and 2."""
    sizes = (1, 2)
    fields: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 100,
        "pass_overhead_ms": 1.0,
        "layer": tuple(
            LinearPoint(operator=name, tensor_parallel_size=n, tokens=t, ms=(0.5 + t / 100) / n)
            for name in ("mlp", "qkv")
            for n in sizes
            for t in (1, 101, 1001)
        ),
        "once": tuple(
            LinearPoint(operator="lm_head", tensor_parallel_size=n, tokens=t, ms=0.25 * t / n)
            for n in sizes
            for t in (1, 100)
        ),
        "prefill_attention": tuple(
            PrefillAttentionPoint(
                tensor_parallel_size=n,
                tokens=t,
                cached_tokens=c,
                ms=((t + c) ** 2 - c * c) / n / 1e5,
            )
            for n in sizes
            for t in (100, 200, 400)
            for c in (0, 300)
        ),
        "decode_attention": tuple(
            DecodeAttentionPoint(
                tensor_parallel_size=n, batch=b, context_tokens=c, ms=0.1 + c / n / 1e4
            )
            for n in sizes
            for b in (1, 8)
            for c in (100, 1000)
        ),
        "all_reduce": tuple(
            CommunicationPoint(gpus=2, size_bytes=s, ms=0.05 + s / 1e6)
            for s in (200, 20_200, 200_200)
        ),
        "send": tuple(CommunicationPoint(size_bytes=s, ms=0.02 + s / 1e6) for s in (200, 200_200)),
        **parts,
    }
    return Operators(**fields)
