"""The emulated engine's own scheduler under a clock of the benchmark's.

What is hard: the engine may know of a request's length only what a predictor says, so each ends by
itself, below its limit.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.fleet import SimulatedEngine
from cleave.simulator.trace import Trace
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineLimits
from cleave_worker.emulator.sequence import EngineRequest, FinishReason, RemotePrefill, Sequence
from cleave_worker.scheduling.config import RoleSchedulingConfig

LIMIT = 4_096
"""Of every output."""
_ELSEWHERE = RemotePrefill("", "", "", 0, ())

Times = NDArray[np.float64]


class Ending(Sequence):
    """A request whose output ends by itself."""

    __slots__ = ("number", "output")

    def __init__(self, request: EngineRequest, number: int, output: int) -> None:
        super().__init__(request)
        self.number, self.output = number, output

    def sample(self) -> tuple[int, FinishReason | None]:
        """As any other, but for when it ends."""
        token, _ = super().sample()
        return token, FinishReason.LENGTH if self.num_outputs >= self.output else None


class GivenPredictions:
    """Predictions by prompt length, which is all that an engine's predictor sees."""

    def __init__(self, outputs: Mapping[int, int]) -> None:
        self._outputs = outputs

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """The given prediction for prompts of this length."""
        return min(self._outputs[prompt_tokens], limit)

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """Times in ms by request, in order of the trace."""

    start_ms: Times
    """When its first pass begins."""
    first_ms: Times
    end_ms: Times
    preemptions: int


def run(trace: Trace, engine: SimulatedEngine, *, decodes: bool) -> Run:
    """All of a trace; `decodes`: prompts come computed, else requests end with their first token.

    Batching is vLLM's; orders, chunk and admission are the engine's.
    """
    predicted = trace.output_tokens if trace.predicted_tokens is None else trace.predicted_tokens
    predictor = GivenPredictions(
        dict(zip(trace.prompt_tokens.tolist(), predicted.tolist(), strict=True))
    )
    limits = EngineLimits(engine.max_num_seqs, engine.max_num_batched_tokens, engine.prefix_caching)
    pool = BlockPool(engine.kv_capacity_tokens // engine.kv_block_size, engine.kv_block_size)
    scheduler = EmulatedScheduler(limits, pool, predictor)
    scheduler.apply_scheduling(
        RoleSchedulingConfig(engine.order, engine.prefill_sched_batch, admission=engine.admission)
    )
    coming = [_sequence(trace, number, decodes) for number in range(len(trace))][::-1]
    start, first, end = (np.full(len(trace), np.nan) for _ in range(3))
    now = 0.0
    while True:
        while coming and trace.arrival_ms[coming[-1].number] <= now:
            scheduler.add(coming.pop())
        step = scheduler.schedule()
        for sequence in step.loads:
            scheduler.load(sequence, [0] * len(sequence.blocks))
        if step.scheduled:
            for sequence, _ in step.scheduled:
                start[sequence.number] = np.fmin(start[sequence.number], now)
            now += engine.timing.predict_iteration_ms(
                step.chunks, step.num_decode_tokens, step.context_tokens
            )
            for sequence, _, finish in scheduler.complete(step):
                first[sequence.number] = np.fmin(first[sequence.number], now)
                if finish:
                    end[sequence.number] = now
                    scheduler.release(sequence.request.id)
        elif not step.loads and coming:
            now = trace.arrival_ms[coming[-1].number]
        elif not step.loads:
            return Run(start, first, end, scheduler.num_preemptions)


def _sequence(trace: Trace, number: int, decodes: bool) -> Ending:
    # No two begin alike.
    prompt = array("I", range(number << 16, (number << 16) + int(trace.prompt_tokens[number])))
    request = EngineRequest(
        str(number),
        prompt,
        LIMIT,
        ignore_eos=True,
        do_remote_decode=not decodes,
        handoff=_ELSEWHERE if decodes else None,
    )
    return Ending(request, number, int(trace.output_tokens[number]) if decodes else 1)
