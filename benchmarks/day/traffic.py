"""The day's traffic: Azure's code service, then its conversations, which double, come in bursts
and go on while a node is lost. Times are those of the trace; the clock of the wall is another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cleave.simulator.trace import Trace
from cleave.traffic import history
from cleave.traffic.characterization import fit_lengths

FILES = {
    "code": "AzureLLMInferenceTrace_2023_code.csv",
    "conversation": "AzureLLMInferenceTrace_2023_conv.csv",
}
"""Of Azure/AzurePublicDataset (CC-BY-4.0; described in Splitwise, ISCA 2024)."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic that stays alike for a while."""

    name: str
    service: str
    rate: float
    """Requests per second of the trace."""
    burstiness: float = 1.0
    """Coefficient of variation of the gaps."""
    loses_node: bool = False
    """Whether a node is lost as it begins, for the rest of the day."""


PHASES = (
    Phase("code", "code", 5.5),
    Phase("conversation", "conversation", 5.0),
    Phase("doubled", "conversation", 10.0),
    Phase("bursts", "conversation", 7.0, burstiness=2.5),
    Phase("a node lost", "conversation", 6.0, loses_node=True),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of lengths of one service."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def to_workload(self, phase: Phase) -> dict[str, object]:
        """As `spec.workload` says it."""
        return {
            "rate": phase.rate,
            "burstiness": phase.burstiness,
            "promptTokens": _state(self.prompt_tokens),
            "outputTokens": _state(self.output_tokens),
        }


@dataclass(frozen=True, slots=True)
class Day:
    """All requests, and which phase each belongs to."""

    phases: tuple[Phase, ...]
    phase_ms: float
    trace: Trace
    phase_of: np.ndarray

    def cut(self, index: int) -> Trace:
        """One phase by itself, from 0 ms."""
        mine = self.phase_of == index
        trace = self.trace
        return Trace(
            trace.arrival_ms[mine] - index * self.phase_ms,
            trace.prompt_tokens[mine],
            trace.output_tokens[mine],
        )


def read_lengths(folder: Path, max_model_len: int) -> dict[str, Lengths]:
    """By service; requests that are too long for the model are left out."""
    found = {}
    for service, name in FILES.items():
        recorded = history.read_trace(folder / name)
        # Two tokens at least: a request without a second one has no time per output token.
        output = np.maximum(2, recorded.output_tokens)
        fits = recorded.prompt_tokens + output <= max_model_len
        found[service] = Lengths(recorded.prompt_tokens[fits], output[fits])
    return found


def draw_day(
    phases: Sequence[Phase], lengths: dict[str, Lengths], phase_ms: float, seed: int
) -> Day:
    """The same requests for the same seed."""
    rng = np.random.default_rng(seed)
    arrivals, prompts, outputs, phase_of = [], [], [], []
    for index, phase in enumerate(phases):
        at_ms = _draw_arrivals(rng, phase, phase_ms)
        kind = lengths[phase.service]
        chosen = rng.integers(len(kind.prompt_tokens), size=len(at_ms))
        arrivals.append(at_ms + index * phase_ms)
        prompts.append(kind.prompt_tokens[chosen])
        outputs.append(kind.output_tokens[chosen])
        phase_of.append(np.full(len(at_ms), index))
    trace = Trace(*(np.concatenate(some) for some in (arrivals, prompts, outputs)))
    return Day(tuple(phases), phase_ms, trace, np.concatenate(phase_of))


def _draw_arrivals(rng: np.random.Generator, phase: Phase, phase_ms: float) -> np.ndarray:
    """Gaps are gamma distributed; their number follows from the rate for any seed."""
    count = round(phase.rate * phase_ms / 1e3)
    shape = phase.burstiness**-2
    at = np.cumsum(rng.gamma(shape, size=count + 1))
    return np.asarray(at[:-1] / at[-1] * phase_ms)


def _state(tokens: np.ndarray) -> dict[str, float]:
    return fit_lengths(float(tokens.mean()), float(np.percentile(tokens, 90))).model_dump()
