"""Latency profiles by name or from a file. Used by the emulated engine and the planner.

This module stays light (standard library only): 64 emulated engines import it.
"""

from dataclasses import dataclass
from pathlib import Path

from cleave.perf import distserve, measured, operator_profile, profile
from cleave.perf.profile_fields import InvalidProfileError
from cleave.perf.timing import Timing

_FILES = (".yaml", ".yml", ".json")
_LARGEST_BATCH = 1024
"""Decode passes are tabulated up to here; the fits are straight lines beyond."""


class UnknownProfileError(LookupError):
    """No latency profile of that name, or a file that is none."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A named, measured instance: one engine, model and parallelism on one kind of GPU."""

    name: str
    model: str
    timing: Timing
    kv_capacity_tokens: int


def load(name: str) -> Profile:
    """The profile ENGINE/MODEL/tpN, or the one in a file that `cleave profile` wrote.

    Raises UnknownProfileError, which lists the names there are or says what the file lacks.
    """
    if is_file(name):
        return _read(name)
    fit = distserve.FITS.get(name)
    if fit is None:
        raise UnknownProfileError(
            f"no latency profile {name!r}; there are: {', '.join(names())}, "
            f"and files ending in {', '.join(_FILES)}"
        )
    _, model, parallelism = name.split("/")
    tensor_parallel_size = int(parallelism.removeprefix("tp"))
    capacity = distserve.KV_CAPACITY_TOKENS[model][tensor_parallel_size, 1]
    return Profile(name, model, to_timing(fit), capacity)


def is_file(name: str) -> bool:
    """Whether `load` takes this name for the path of a file."""
    return name.endswith(_FILES)


def names() -> tuple[str, ...]:
    """Every profile that `load` knows without a file."""
    return tuple(distserve.FITS)


def to_timing(fit: distserve.Fit, stages: int = 1) -> Timing:
    """DistServe's fit (OSDI'24, section 4.1 and appendix A), coefficients as published.

    prefill ms = a + b * sum(len) + c * sum(len^2); decode ms = a + b * sum(context) + c * batch.
    """
    decode = [
        fit.decode_small if batch < distserve.DECODE_REGIME else fit.decode_large
        for batch in range(_LARGEST_BATCH + 1)
    ]
    return Timing(
        prompt_step=1.0,
        prompt_ms=(fit.prefill.fixed_ms, fit.prefill.fixed_ms + fit.prefill.per_token_ms),
        prompt_square_ms=fit.prefill.last_ms,
        decode_ms=tuple(line.fixed_ms + line.last_ms * n for n, line in enumerate(decode)),
        decode_context_ms=tuple(line.per_token_ms for line in decode),
        stages=stages,
    )


def _read(path: str) -> Profile:
    try:
        found = profile.read(Path(path))
        if found.kv_capacity_tokens is None:
            raise InvalidProfileError(
                f"{path}: kvCapacityTokens: is missing; state how many tokens an instance holds"
            )
        return Profile(path, found.model, _timing(found), found.kv_capacity_tokens)
    except InvalidProfileError as error:
        raise UnknownProfileError(str(error)) from error


def _timing(found: profile.MeasuredProfile) -> Timing:
    """Of whole passes where they were measured, else put together from operators."""
    if found.prefill:
        return measured.to_timing(found)
    assert found.operators is not None
    return operator_profile.to_timing(
        found.operators, found.tensor_parallel_size, found.pipeline_parallel_size
    )
