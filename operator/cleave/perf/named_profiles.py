"""Latency profiles by name or from a file. Used by the emulated engine and the planner.

Standard library only, to use little memory: 64 emulated engines import it.
"""

from dataclasses import dataclass
from pathlib import Path

from cleave.perf.profile import iteration_fit, operator_fit, profile
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.published import distserve
from cleave.perf.timing import EngineTiming

_SUFFIXES = (".yaml", ".yml", ".json")
_LARGEST_BATCH = 1024
"""Decode iterations are tabulated up to this batch and extrapolated linearly beyond."""


class UnknownProfileError(LookupError):
    """There is no latency profile of that name, or the file is not a usable profile."""


@dataclass(frozen=True, slots=True)
class NamedProfile:
    """A measured instance: one engine, model and parallelism on one GPU type."""

    name: str
    model: str
    timing: EngineTiming
    kv_capacity_tokens: int


def load_profile(name: str) -> NamedProfile:
    """The profile ENGINE/MODEL/tpN, or the one in a file that `cleave profile` wrote. Raises
    UnknownProfileError, which lists the known names or what the file lacks."""
    if is_profile_file(name):
        return _load_file(name)
    fit = _find_fit(name)
    _, model, parallelism = name.split("/")
    capacity = distserve.KV_CAPACITY_TOKENS[model][int(parallelism.removeprefix("tp")), 1]
    return NamedProfile(name, model, to_timing(fit), capacity)


def check_profile(name: str) -> None:
    """Raise UnknownProfileError where `load_profile` would."""
    if is_profile_file(name):
        _load_file(name)
    else:
        _find_fit(name)


def is_profile_file(name: str) -> bool:
    """Whether `load_profile` treats this name as the path of a file."""
    return name.endswith(_SUFFIXES)


def list_names() -> tuple[str, ...]:
    """The names of all profiles that need no file."""
    return tuple(distserve.FITS)


def to_timing(fit: distserve.PublishedFit, stages: int = 1) -> EngineTiming:
    """DistServe's fit (OSDI'24, section 4.1 and appendix A), coefficients as published. prefill ms
    = a + b * sum(len) + c * sum(len^2); decode ms = a + b * sum(context) + c * batch."""
    decode = [
        fit.decode_small if batch < distserve.LARGE_BATCH_FROM else fit.decode_large
        for batch in range(_LARGEST_BATCH + 1)
    ]
    return EngineTiming(
        prompt_step=1.0,
        prompt_ms=(fit.prefill.fixed_ms, fit.prefill.fixed_ms + fit.prefill.per_token_ms),
        prompt_square_ms=fit.prefill.regressor_ms,
        decode_ms=tuple(each.fixed_ms + each.regressor_ms * n for n, each in enumerate(decode)),
        decode_context_ms=tuple(each.per_token_ms for each in decode),
        stages=stages,
    )


def _find_fit(name: str) -> distserve.PublishedFit:
    fit = distserve.FITS.get(name)
    if fit is None:
        raise UnknownProfileError(
            f"no latency profile {name!r}; known are: {', '.join(list_names())}, "
            f"and files ending in {', '.join(_SUFFIXES)}"
        )
    return fit


def _load_file(path: str) -> NamedProfile:
    try:
        measurement = profile.read_profile(Path(path))
        capacity = measurement.kv_capacity_tokens
        if capacity is None:
            remedy = "set how many tokens an instance holds"
            raise InvalidProfileError(f"{path}: kvCapacityTokens: is missing; {remedy}")
        return NamedProfile(path, measurement.model, _build_timing(measurement), capacity)
    except InvalidProfileError as error:
        raise UnknownProfileError(str(error)) from error


def _build_timing(measurement: profile.MeasuredProfile) -> EngineTiming:
    """From measured iterations if the profile has them, else composed from its operators."""
    if measurement.prefill:
        return iteration_fit.to_timing(measurement)
    assert measurement.operators is not None
    return operator_fit.to_timing(measurement.operators, *measurement.sizes)
