"""Aladdin's models of prefill and decode iterations (section 3, Eq. 2 and 3), fitted online.

Called by the router, and by the planner for what a router will learn. The coefficients are least
squares over exponentially decaying sums, so that an update costs a few multiplications and no
sample is stored. What is hard: samples of only one
length, or of only one batch size, do not determine them, and a fit to them must be refused.
"""

import math
from dataclasses import dataclass

from cleave.perf.profile import curve
from cleave.perf.timing import EngineTiming

_DECAY = 0.998
"""Factor on the sums at each sample: about the last 500 samples count."""
_MIN_SAMPLES = 8
"""Smallest number of samples for a fit."""
_ERROR_SAMPLES = 100
"""About this many of the latest samples count in the error."""
_MAX_RATIO = 4.0
"""A prediction counts in a weight as at least the value divided by this, so that a fit that is far
too low does not give a sample the weight of many."""
_MAX_TRUSTED_ERROR = 0.5
"""With a larger error of the latest predictions weights do not depend on them."""
_FITTED_PROMPTS = range(128, 2049, 128)
_FITTED_BATCHES = (2, 4, 8, 16, 32)
_FITTED_CONTEXTS = (200, 1_000, 4_000)
"""Tokens of prompts, requests that decode together, and tokens of context of each of them, at which
`fit_timings` samples a latency model."""


class TooFewSamplesError(ValueError):
    """The samples do not determine the coefficients."""


class OnlineFit:
    """Least squares for value = coefficients . row, sample by sample; old samples decay.

    Errors relative to predictions are minimised: a row has the weight 1 / predicted^2, by the fit
    so far. Relative to values, the fit would be too low by twice the square of the relative spread,
    5 % at a spread of 15 %, as the lower one of two values would weigh more. They count only while
    there is no fit or it is wrong: at the start, and after a machine has changed its speed.
    `error` is measured on each sample before the fit includes it, so it is that of a prediction.
    """

    def __init__(self, size: int, decay: float = _DECAY) -> None:
        self._decay = decay
        self._moments = [[0.0] * size for _ in range(size)]
        self._right_side = [0.0] * size
        self._error_sum = 0.0
        self._error_weight = 0.0
        self._value_sum = 0.0
        self._value_weight = 0.0
        self.num_samples = 0

    def add(self, row: tuple[float, ...], value: float) -> None:
        """Include one sample. Raises ValueError for a value not above 0 or numbers not finite."""
        if not all(math.isfinite(part) for part in (*row, value)) or value <= 0:
            raise ValueError(f"sample {row} -> {value} is invalid; values must be above 0")
        predicted = self._predict(row)
        self._update_averages(predicted, value)
        weight = 1 / self._choose_scale(predicted, value) ** 2
        for i, part in enumerate(row):
            self._right_side[i] = self._right_side[i] * self._decay + weight * part * value
            for j, other in enumerate(row):
                self._moments[i][j] = self._moments[i][j] * self._decay + weight * part * other
        self.num_samples += 1

    def solve(self) -> tuple[float, ...]:
        """The coefficients in the rows' order, none below 0. Raises TooFewSamplesError."""
        if self.num_samples < _MIN_SAMPLES:
            raise TooFewSamplesError(
                f"{self.num_samples} samples are too few for a fit; {_MIN_SAMPLES} are needed"
            )
        try:
            return curve.solve_moments(self._moments, self._right_side)
        except ValueError as error:
            raise TooFewSamplesError(f"{error}; more diverse samples are needed") from error

    @property
    def error(self) -> float | None:
        """Mean absolute error of the latest predictions, relative to values, each 1 at most; None
        before the first one."""
        return self._error_sum / self._error_weight if self._error_weight else None

    def _update_averages(self, predicted: float | None, value: float) -> None:
        """Of the values, and of the errors of their predictions."""
        self._value_sum = self._value_sum * self._decay + value
        self._value_weight = self._value_weight * self._decay + 1
        if predicted is not None:
            fading = 1 - 1 / _ERROR_SAMPLES
            self._error_sum = self._error_sum * fading + min(abs(predicted - value) / value, 1.0)
            self._error_weight = self._error_weight * fading + 1

    def _choose_scale(self, predicted: float | None, value: float) -> float:
        """What the error of a sample is relative to."""
        is_trusted = self._error_sum <= _MAX_TRUSTED_ERROR * self._error_weight
        if predicted is not None and is_trusted:
            return max(predicted, value / _MAX_RATIO)
        return max(value, self._value_sum / self._value_weight / _MAX_RATIO)

    def _predict(self, row: tuple[float, ...]) -> float | None:
        """The value by the fit so far; None: there is none."""
        try:
            coefficients = self.solve()
        except TooFewSamplesError:
            return None
        return sum(part * each for part, each in zip(row, coefficients, strict=True))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of Eq. 2 and 3, in milliseconds and tokens."""

    k1: float
    """Prefill, per prompt token."""
    c1: float
    """Prefill, per iteration."""
    k2: float
    """Decode, per context token."""
    c2: float
    """Decode, per request in the batch."""
    c3: float
    """Decode, per iteration."""

    def predict_prefill_ms(self, prompt_tokens: float) -> float:
        """Eq. 2: an iteration over prompts with that many tokens in total."""
        return self.k1 * prompt_tokens + self.c1

    def predict_decode_ms(self, batch: float, context_tokens: float) -> float:
        """Eq. 3: a decode iteration of `batch` requests; l_ave * b is the sum of their contexts."""
        return self.k2 * context_tokens + self.c2 * batch + self.c3

    @property
    def is_rising(self) -> bool:
        """Whether prompts and contexts lengthen iterations; else no instance is ever full."""
        return self.k1 > 0 and self.k2 > 0

    def to_timing(self, largest_batch: int = 1024) -> EngineTiming:
        """The same model in the form that simulator and emulator use."""
        return EngineTiming(
            prompt_step=1.0,
            prompt_ms=(self.c1, self.c1 + self.k1),
            prompt_square_ms=0.0,
            decode_ms=tuple(self.c3 + self.c2 * batch for batch in range(largest_batch + 1)),
            decode_context_ms=(self.k2,),
        )


class IterationTimeModel:
    """Eq. 2 and 3 fitted online to observed iterations."""

    def __init__(self) -> None:
        self.prefill = OnlineFit(2)
        self.decode = OnlineFit(3)

    def add_prefill(self, prompt_tokens: int, ms: float) -> None:
        """Include an iteration over prompts with that many tokens in total, which took `ms`."""
        self.prefill.add((float(prompt_tokens), 1.0), ms)

    def add_decode(self, batch: int, context_tokens: int, ms: float) -> None:
        """Include a decode iteration of `batch` requests, which took `ms`.
        The model holds for more than one request (b > 1), so a batch of one is ignored (paper)."""
        if batch > 1:
            self.decode.add((float(context_tokens), float(batch), 1.0), ms)

    def solve(self) -> Coefficients:
        """The current coefficients, none below 0. Raises TooFewSamplesError with the phase."""
        coefficients: list[float] = []
        for phase, fit in (("prefill", self.prefill), ("decode", self.decode)):
            try:
                coefficients += fit.solve()
            except TooFewSamplesError as error:
                raise TooFewSamplesError(f"{phase}: {error}") from error
        return Coefficients(*coefficients)


def fit_timings(prefill: EngineTiming, decode: EngineTiming) -> Coefficients | None:
    """The coefficients that a router learns from prompts on engines with the times `prefill` and
    outputs on engines with `decode`; None: no line through them rises, so it learns none."""
    model = IterationTimeModel()
    for tokens in _FITTED_PROMPTS:
        model.add_prefill(tokens, prefill.predict_prefill_ms([tokens]))
    for batch in _FITTED_BATCHES:
        for context in _FITTED_CONTEXTS:
            tokens = batch * context
            model.add_decode(batch, tokens, decode.predict_decode_ms(batch, tokens))
    try:
        coefficients = model.solve()
    except TooFewSamplesError:
        return None
    return coefficients if coefficients.is_rising else None
