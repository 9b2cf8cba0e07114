"""Aladdin's performance models (section 3, Eq. 1 to 4), fitted from what production shows.

Used where passes or requests are observed: KV use of requests (Eq. 1), prefill passes (Eq. 2) and
decode passes (Eq. 3, turned around in Eq. 4). The coefficients follow the traffic: least squares
over sums that fade, so that an update costs a few multiplications and no sample is stored. What is
hard: samples of one length, or of one batch, determine nothing, and a fit to them must be refused.
"""

import math
from dataclasses import dataclass

from cleave.perf import curve
from cleave.perf.timing import Timing
from cleave.perf.trust import Basis, Trust

_FORGETTING = 0.998
"""Weight of the past at each sample: about the last 500 count."""
_FEWEST = 8
"""Samples below which no coefficients are given."""
_ERROR_SAMPLES = 100
"""About as many samples count in the error."""


class TooFewSamplesError(ValueError):
    """The samples do not determine the coefficients."""


class OnlineFit:
    """Least squares for value = coefficients . row, sample by sample; old ones fade.

    Relative errors are minimised: a row counts by 1 / value^2. `error` is measured on each sample
    before it is learnt, so it is what a prediction would have missed.
    """

    def __init__(self, size: int, forgetting: float = _FORGETTING) -> None:
        self._forgetting = forgetting
        self._moments = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size
        self._error_sum = 0.0
        self._error_weight = 0.0
        self.num_samples = 0

    def add(self, row: tuple[float, ...], value: float) -> None:
        """Learn one sample. Raises ValueError for a value not above 0 or a number that is none."""
        if not all(math.isfinite(part) for part in (*row, value)) or value <= 0:
            raise ValueError(f"sample {row} -> {value} is no measurement; values must be above 0")
        if self.num_samples >= _FEWEST:
            self._judge(row, value)
        weight = 1 / value**2
        for i, part in enumerate(row):
            self._right[i] = self._right[i] * self._forgetting + weight * part * value
            for j, other in enumerate(row):
                old = self._moments[i][j] * self._forgetting
                self._moments[i][j] = old + weight * part * other
        self.num_samples += 1

    def coefficients(self) -> tuple[float, ...]:
        """In the rows' order, none below 0. Raises TooFewSamplesError."""
        if self.num_samples < _FEWEST:
            raise TooFewSamplesError(
                f"{self.num_samples} samples are too few for a fit; {_FEWEST} are needed"
            )
        try:
            return curve.solve_moments(self._moments, self._right)
        except ValueError as error:
            raise TooFewSamplesError(f"{error}; more different ones are needed") from error

    @property
    def error(self) -> float | None:
        """Mean absolute percentage error of the latest predictions; None before there were any."""
        return self._error_sum / self._error_weight if self._error_weight else None

    def _judge(self, row: tuple[float, ...], value: float) -> None:
        try:
            found = self.coefficients()
        except TooFewSamplesError:
            return
        predicted = sum(part * each for part, each in zip(row, found, strict=True))
        fading = 1 - 1 / _ERROR_SAMPLES
        self._error_sum = self._error_sum * fading + abs(predicted - value) / value
        self._error_weight = self._error_weight * fading + 1


class KvUse:
    """Eq. 1: kv = h (l_in + l_out) + j, in whatever unit the samples have."""

    def __init__(self) -> None:
        self.fit = OnlineFit(2)

    def add(self, tokens: int, kv: float) -> None:
        """A request with prompt and output so far of `tokens` holds `kv`."""
        self.fit.add((float(tokens), 1.0), kv)

    def kv(self, tokens: float) -> float:
        """KV that a request of that many tokens holds. Raises TooFewSamplesError."""
        h, j = self.fit.coefficients()
        return h * tokens + j


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of Eq. 2 and 3; milliseconds and tokens."""

    k1: float
    """Prefill, per prompt token."""
    c1: float
    """Prefill, per pass."""
    k2: float
    """Decode, per context token."""
    c2: float
    """Decode, per request in the batch."""
    c3: float
    """Decode, per pass."""

    def prefill_ms(self, prompt_tokens: float) -> float:
        """Eq. 2: a pass over prompts of that many tokens together."""
        return self.k1 * prompt_tokens + self.c1

    def decode_ms(self, batch: int, context_tokens: float) -> float:
        """Eq. 3: a pass of `batch` requests; l_ave * b is the sum of their contexts."""
        return self.k2 * context_tokens + self.c2 * batch + self.c3

    def most_context_tokens(self, batch: int, itl_ms: float) -> float:
        """Eq. 4: sum of contexts that a batch may have when a pass is to take `itl_ms`.

        Below 0: not even empty contexts keep to it. Infinite: contexts cost nothing.
        """
        spare_ms = itl_ms - self.c3 - self.c2 * batch
        return spare_ms / self.k2 if self.k2 > 0 else math.copysign(math.inf, spare_ms)

    def timing(self, largest_batch: int = 1024) -> Timing:
        """The same lines as the form that simulator and emulator compute with."""
        return Timing(
            prompt_step=1.0,
            prompt_ms=(self.c1, self.c1 + self.k1),
            prompt_square_ms=0.0,
            decode_ms=tuple(self.c3 + self.c2 * batch for batch in range(largest_batch + 1)),
            decode_context_ms=(self.k2,),
        )


def fit_timing(
    timing: Timing, largest_batch: int = 256, longest_tokens: int = 4096
) -> Coefficients:
    """The lines that come nearest to passes known otherwise, by relative error.

    Over prompts up to `longest_tokens`, and over batches of two and more up to `largest_batch`
    whose contexts are that long at most.
    """
    lengths = [longest_tokens * step // 16 for step in range(1, 17)]
    prompts = [((float(tokens), 1.0), timing.prefill_ms([tokens])) for tokens in lengths]
    batches = [max(2, largest_batch >> shift) for shift in range(8)]
    contexts = (longest_tokens // 16, longest_tokens // 4, longest_tokens)
    decodes = [
        ((float(batch * each), float(batch), 1.0), timing.decode_pass_ms(batch, batch * each))
        for batch in batches
        for each in contexts
    ]
    found: list[float] = []
    for samples in (prompts, decodes):
        rows, values = zip(*samples, strict=True)
        found += curve.least_squares(rows, values, [value**-2 for value in values])
    return Coefficients(*found)


class IterationTimes:
    """Eq. 2 and 3 learnt from passes that ran."""

    def __init__(self) -> None:
        self.prefill = OnlineFit(2)
        self.decode = OnlineFit(3)

    def add_prefill(self, prompt_tokens: int, ms: float) -> None:
        """A pass over prompts of that many tokens together took `ms`."""
        self.prefill.add((float(prompt_tokens), 1.0), ms)

    def add_decode(self, batch: int, context_tokens: int, ms: float) -> None:
        """A pass with one token for each of `batch` requests took `ms`.

        The model holds for more than one request (b > 1); single ones are left out, as the paper
        does.
        """
        if batch > 1:
            self.decode.add((float(context_tokens), float(batch), 1.0), ms)

    def coefficients(self) -> Coefficients:
        """The latest, none below 0. Raises TooFewSamplesError, which says what is missing."""
        found: list[float] = []
        for phase, fit in (("prefill", self.prefill), ("decode", self.decode)):
            try:
                found += fit.coefficients()
            except TooFewSamplesError as error:
                raise TooFewSamplesError(f"{phase}: {error}") from error
        return Coefficients(*found)

    def trust(self) -> Trust:
        """Its error is that of the worse phase, each sample predicted before it was learnt."""
        known = [each for each in (self.prefill.error, self.decode.error) if each is not None]
        source = "Aladdin's models, fitted to observed passes"
        return Trust(Basis.FITTED, source, max(known, default=None))
