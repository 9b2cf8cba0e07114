"""Fleets that mean what simdistserve simulates, so that both can be compared request by request.

Called by run.py. What differs there from Cleave's own assumptions, and is copied here:
- every pass costs 2 ms and 0.0001 ms per token more (its `add_ray_overhead`), a prefill pass 1 ms
  per pipeline stage more (`pp_const`);
- the first token comes from the prefill instance, and then as many passes follow as the request has
  output tokens: one more than the tokens that remain;
- memory is never short: a prefill pass takes the whole queue up to the instance's KV capacity.
What cannot be copied: its decode pass takes at most 50,000 tokens of context, a constant left in
its source, and requests beyond that take turns. With pipeline stages it charges the overhead to the
first stage alone, where all stages are equal here, and lets any number of passes into a pipeline;
vLLM and DistServe's own engine let in as many as there are stages (single_stage_engine.py), and so
does Cleave. Cases in which neither happens are `Match.EXACT`: both programs describe the same
passes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from cleave.perf.named_profiles import to_timing
from cleave.perf.published.distserve import FITS, KV_CAPACITY_TOKENS, AffineFit, PublishedFit
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace

DECODE_LIMIT_TOKENS = 50_000
PASS_MS = 2.0
PASS_TOKEN_MS = 0.0001
PREFILL_STAGE_MS = 1.0
AMPLE_TOKENS = 100_000_000
AMPLE_SEQS = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of simdistserve under one load."""

    backend: str
    """`distserve`: one prefill and one decode instance; `vllm`: one colocated instance."""
    model: str
    prefill: tuple[int, int]
    """Tensor and pipeline parallel size; of the only instance for `vllm`."""
    decode: tuple[int, int]
    rate: float
    targets_ms: tuple[float, float]
    """TTFT and TPOT."""

    @property
    def name(self) -> str:
        """`opt-13b TP 2 / TP 1 @ 4/s`: prefill / decode."""
        sizes = [self.prefill] if self.backend == "vllm" else [self.prefill, self.decode]
        parts = [f"TP {tp}" + (f" PP {pp}" if pp > 1 else "") for tp, pp in sizes]
        colocated = " colocated" if len(sizes) == 1 else ""
        return f"{self.model} {' / '.join(parts)}{colocated} @ {self.rate:g}/s"

    @property
    def has_stages(self) -> bool:
        """Whether either phase is a pipeline."""
        return max(self.prefill[1], self.decode[1]) > 1


class Match(StrEnum):
    """How much of a case both programs mean alike."""

    EXACT = "exact"
    LIMITED = "over 50,000 tokens"
    STAGED = "pipeline stages"


def match(case: Case, outcome: SimulationResult) -> Match:
    """`outcome` is Cleave's."""
    if case.has_stages:
        return Match.STAGED
    peak_tokens = outcome.instances.kv_peak_tokens[-1]
    return Match.LIMITED if peak_tokens > DECODE_LIMIT_TOKENS else Match.EXACT


def to_fleet(case: Case) -> SimulatedFleet:
    """The fleet that simulates `case` as simdistserve does."""
    if case.backend == "vllm":
        return SimulatedFleet(mixed=(SimulatedPool(_engine(case, case.prefill), 1),))
    return SimulatedFleet(
        prefill=(SimulatedPool(_engine(case, case.prefill), 1),),
        decode=(SimulatedPool(_engine(case, case.decode), 1),),
        first_token_by_decode=False,
    )


def to_trace(trace: Trace) -> Trace:
    """The same requests from 0 on, with the one decode pass more that simdistserve runs."""
    return replace(
        trace,
        arrival_ms=trace.arrival_ms - trace.arrival_ms[0],
        output_tokens=trace.output_tokens + np.int64(1),
    )


def _engine(case: Case, parallelism: tuple[int, int]) -> SimulatedEngine:
    return SimulatedEngine(
        timing=_timing(case, parallelism),
        kv_capacity_tokens=AMPLE_TOKENS,
        batching=Batching.PREFILL_FIRST,
        max_num_seqs=AMPLE_SEQS,
        max_num_batched_tokens=KV_CAPACITY_TOKENS[case.model][parallelism],
    )


def _timing(case: Case, parallelism: tuple[int, int]) -> EngineTiming:
    tensor_parallel_size, stages = parallelism
    fit = FITS[f"{case.backend}/{case.model}/tp{tensor_parallel_size}"]
    # The 1 ms of each stage is paid on each of them, after the rest was divided among them.
    prefill_ms = PASS_MS + PREFILL_STAGE_MS * stages * stages
    return to_timing(
        PublishedFit(
            prefill=_add(fit.prefill, prefill_ms, 0.0),
            decode_small=_add(fit.decode_small, PASS_MS, -PASS_TOKEN_MS),
            decode_large=_add(fit.decode_large, PASS_MS, -PASS_TOKEN_MS),
        ),
        stages,
    )


def _add(line: AffineFit, fixed_ms: float, last_ms: float) -> AffineFit:
    """`last_ms` per decoding request: its overhead leaves out the token that the pass adds."""
    return AffineFit(
        line.fixed_ms + fixed_ms, line.per_token_ms + PASS_TOKEN_MS, line.regressor_ms + last_ms
    )
