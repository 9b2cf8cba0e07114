"""Conversion of samples to a profile: medians, spreads, and points that scatter too much."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import TypedDict

from cleave.perf.profile.profile import DecodePoint, MeasuredProfile, MixedPoint, PrefillPoint
from cleave.profiling.engine_info import EngineInfo
from cleave.profiling.measurements import (
    DecodeCase,
    MeasuredCase,
    MixedCase,
    OverheadCase,
    PrefillCase,
    Sample,
)


class MeasuredDuration(TypedDict):
    """The fields of a profile point for its duration."""

    ms: float
    repeats: int
    spread_ms: float


def compute_spread_share(values: Sequence[float]) -> float:
    """Distance of the quartiles divided by the median; 0 for a single value."""
    return _compute_quartile_distance(values) / median(values) if len(values) > 1 else 0.0


def list_scattered(samples: Mapping[MeasuredCase, Sequence[Sample]], limit: float) -> list[str]:
    """A line for each point whose samples scatter more than `limit`."""
    lines = []
    for what, group in samples.items():
        values = [sample.ms for sample in group]
        share = compute_spread_share(values)
        if not isinstance(what, OverheadCase) and share > limit:
            lines.append(f"{_describe_case(what)}: {share:.0%} of {median(values):.2f} ms")
    return lines


def build_profile(
    samples: Mapping[MeasuredCase, Sequence[Sample]],
    facts: EngineInfo,
    *,
    device: str,
    measured_at: str,
    software: Mapping[str, str],
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
) -> MeasuredProfile:
    """The profile of these samples. Raises cleave.perf.profile.codec.InvalidProfileError."""
    prefill: list[PrefillPoint] = []
    decode: list[DecodePoint] = []
    mixed: list[MixedPoint] = []
    for what, group in samples.items():
        context, duration = _compute_median_context(group), _summarize(group)
        match what:
            case PrefillCase():
                prefill.append(PrefillPoint(prompts=what.prompts, tokens=what.tokens, **duration))
            case DecodeCase():
                decode.append(DecodePoint(batch=what.batch, context_tokens=context, **duration))
            case MixedCase():
                sizes = {"prompt_tokens": what.prompt_tokens, "batch": what.batch}
                mixed.append(MixedPoint(**sizes, context_tokens=context, **duration))
            case OverheadCase():
                continue
    return MeasuredProfile(
        model=facts.source,
        device=device,
        engine=facts.engine,
        measured_at=measured_at,
        software=software,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        max_model_len=facts.max_model_len,
        dispatch_ms=round(find_dispatch_ms(samples), 3),
        prefill=tuple(sorted(prefill, key=lambda point: point.key)),
        decode=tuple(sorted(decode, key=lambda point: point.key)),
        mixed=tuple(sorted(mixed, key=lambda point: point.key)),
    )


def find_dispatch_ms(samples: Mapping[MeasuredCase, Sequence[Sample]]) -> float:
    """Median over all prompts of the client's time minus the engine's own time."""
    overheads = [
        median(sample.ms for sample in group)
        for what, group in samples.items()
        if isinstance(what, OverheadCase)
    ]
    return median(overheads) if overheads else 0.0


def _summarize(samples: Sequence[Sample]) -> MeasuredDuration:
    values = [sample.ms for sample in samples]
    return {
        "ms": round(median(values), 4),
        "repeats": len(values),
        "spread_ms": round(_compute_quartile_distance(values), 4),
    }


def _compute_median_context(samples: Sequence[Sample]) -> int:
    return round(median(sample.context_tokens for sample in samples))


def _compute_quartile_distance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third - first


def _describe_case(what: MeasuredCase) -> str:
    if isinstance(what, PrefillCase):
        return f"prefill of {what.prompts} x {what.tokens} tokens"
    if isinstance(what, DecodeCase):
        return f"decoding {what.batch} x {what.prompt_tokens} tokens"
    if isinstance(what, MixedCase):
        return (
            f"a prompt of {what.prompt_tokens} tokens beside {what.batch} x "
            f"{what.context_prompt_tokens}"
        )
    return f"dispatch of {what.tokens} tokens"
