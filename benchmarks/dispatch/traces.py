"""Recorded lengths, the arrivals drawn for them, and what a router would predict of them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cleave.policy.output_length import ConditionalMean
from cleave.simulator.trace import Trace
from cleave.traffic import history

DATA = Path(__file__).parents[3] / "shared" / "data"
UNKNOWN = 256.0
BEHIND = 500
"""Requests that are still running when one is placed: their outputs are not known yet."""


def read(service: str) -> Trace:
    """`code` or `conv`: an hour of Azure's traffic in November 2023."""
    return history.read_trace(DATA / f"AzureLLMInferenceTrace_2023_{service}.csv")


def draw(lengths: Trace, rate: float, requests: int, seed: int, most: int) -> Trace:
    """Poisson arrivals, pairs of lengths drawn from those recorded, `most` tokens together."""
    rng = np.random.default_rng(seed)
    fits = np.flatnonzero(lengths.prompt_tokens + lengths.output_tokens <= most)
    some = rng.choice(fits, requests)
    prompt, output = lengths.prompt_tokens[some], lengths.output_tokens[some]
    arrival = np.cumsum(rng.exponential(1000 / rate, requests))
    return Trace(arrival, prompt, output, predict(prompt, output))


def predict(prompt: NDArray[np.int64], output: NDArray[np.int64]) -> NDArray[np.int64]:
    """Outputs as the router predicts them: learnt from those before."""
    lengths = ConditionalMean(UNKNOWN)
    predicted = np.empty_like(output)
    for at in range(len(prompt)):
        predicted[at] = max(round(lengths.predict(int(prompt[at]))), 1)
        if at >= BEHIND:
            lengths.observe(int(prompt[at - BEHIND]), int(output[at - BEHIND]))
    return predicted
