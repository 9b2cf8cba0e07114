"""An EngineTiming fitted to a measured profile, and its validation errors.

Called by the emulated engine and the planner's estimator: standard library only. Prefill is
interpolated (an affine fit is 9 to 16 % off on Splitwise's measurements), decode is a line over the
context for each batch. Mixed iterations are predicted from the two; their points only check this.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.perf.estimate import Confidence, LatencySource
from cleave.perf.profile import curve, decode_fit
from cleave.perf.profile.decode_fit import iter_folds
from cleave.perf.profile.profile import MeasuredProfile, PrefillPoint
from cleave.perf.timing import EngineTiming, PromptChunk

_MIN_LENGTHS_FOR_CURVATURE = 4
"""Smallest number of prompt lengths for which a parabola is fitted."""


@dataclass(frozen=True, slots=True)
class ValidationErrors:
    """Mean absolute percentage errors on held-out points; None: too few points."""

    prefill: float | None
    decode: float | None
    mixed: float | None
    """Over all mixed points, because the fit does not use them."""


def to_timing(profile: MeasuredProfile) -> EngineTiming:
    """The fit to `profile.prefill` and `profile.decode`; neither may be empty."""
    step, prompt_ms, square_ms = _fit_prefill(profile.prefill)
    decode_ms, context_ms = decode_fit.fit_tables(profile.decode)
    # The measurements include the hops between stages.
    stages = profile.pipeline_parallel_size
    return EngineTiming(step, prompt_ms, square_ms, decode_ms, context_ms, stages)


def assess_confidence(profile: MeasuredProfile) -> Confidence:
    """Source and error; the error is the largest of the three in `compute_validation_errors`."""
    errors = compute_validation_errors(profile)
    present = [each for each in (errors.prefill, errors.decode, errors.mixed) if each is not None]
    source = f"{profile.engine} on {profile.device}, measured {profile.measured_at}"
    return Confidence(LatencySource.MEASURED, source, max(present, default=None))


def compute_validation_errors(profile: MeasuredProfile) -> ValidationErrors:
    """Cross-validation: each point but the ends is predicted from a fit to other points."""
    predict = to_timing(profile).predict_iteration_ms
    mixed = [
        (predict([PromptChunk(0, p.prompt_tokens)], p.batch, p.context_tokens), p.ms)
        for p in profile.mixed
    ]
    return ValidationErrors(
        prefill=curve.compute_mean_error(_iter_prefill_pairs(profile.prefill)),
        decode=decode_fit.compute_validation_error(profile.decode),
        mixed=curve.compute_mean_error(mixed),
    )


def _fit_prefill(points: Sequence[PrefillPoint]) -> tuple[float, tuple[float, ...], float]:
    """(step of the table, table of ms by prompt tokens, ms per token^2)."""
    square_ms = _fit_square_ms(points)
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for point in points:
        tokens = point.prompts * point.tokens
        by_tokens[tokens].append(max(point.ms - square_ms * tokens * point.tokens, 0.0))
    means = [(tokens, sum(ms) / len(ms)) for tokens, ms in sorted(by_tokens.items())]
    step = float(curve.find_step(by_tokens))
    return step, curve.tabulate(curve.fit_non_decreasing(means), step), square_ms


def _fit_square_ms(points: Sequence[PrefillPoint]) -> float:
    """ms per token^2: the extra time of one long prompt over the same tokens in short prompts.

    Without batches in the profile it is the curvature over the prompt length, because linear layers
    have none once they are bound by compute.
    """
    singles = [(point.tokens, point.ms) for point in points if point.prompts == 1]
    longest = singles[-1][0] if len(singles) > 1 else 0
    batches = [p for p in points if p.prompts > 1 and p.prompts * p.tokens <= longest]
    if batches:
        extra = [point.tokens**2 * point.prompts * (point.prompts - 1) for point in batches]
        saved = [curve.interpolate(singles, p.prompts * p.tokens) - p.ms for p in batches]
        weights = [1 / point.ms**2 for point in batches]
        square_ms = curve.solve_least_squares([[x] for x in extra], saved, weights)[0]
    elif len(singles) >= _MIN_LENGTHS_FOR_CURVATURE:
        rows = [[1.0, tokens, tokens**2] for tokens, _ in singles]
        weights = [1 / ms**2 for _, ms in singles]
        try:
            square_ms = curve.solve_least_squares(rows, [ms for _, ms in singles], weights)[2]
        except ValueError:  # the relative weights leave fewer than three lengths that count
            return 0.0
    else:
        return 0.0
    # Limited so that the linear part does not decrease from the shortest to the longest prompt.
    (first, first_ms), (last, last_ms) = singles[0], singles[-1]
    return min(square_ms, max((last_ms - first_ms) / (last**2 - first**2), 0.0))


def _iter_prefill_pairs(points: Sequence[PrefillPoint]) -> Iterator[tuple[float, float]]:
    sizes = [point.prompts * point.tokens for point in points]
    for fold in iter_folds(len(points)):
        inside = [points[i] for i in fold if min(sizes) < sizes[i] < max(sizes)]
        rest = [point for point in points if point not in inside]
        if inside and any(point.prompts == 1 for point in rest):
            step, table, square_ms = _fit_prefill(rest)
            timing = EngineTiming(step, table, square_ms, (0.0, 0.0), (0.0,))
            for point in inside:
                yield timing.predict_prefill_ms([point.tokens] * point.prompts), point.ms
