"""One random history of requests through vLLM's own scheduler, the simulator's and the emulator's.

All run without a model: an iteration takes 1 ms. What is hard: the simulator does many decode
iterations in one event and schedules ahead only in what it counts, so its steps are read from its
memory between two events; and vLLM's asynchronous scheduler decides on iteration k + 1 when k
starts, so the loop here is its engine's (`EngineCore.step_with_batch_queue`) under a clock.
"""

import tempfile
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleave.perf.timing import EngineTiming
from cleave.simulator.events import run_events, run_events_with_caches
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.outcome import RequestOutcome
from cleave.simulator.records import LEFT_OUT, NONE
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet
from cleave.simulator.trace import PromptBlocks, Trace
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineLimits
from cleave_worker.emulator.sequence import EngineRequest, Sequence
from cleave_worker.scheduling.config import RoleSchedulingConfig

_MAX_LEN = 4_096


@dataclass(frozen=True)
class History:
    """An engine and what is sent to it."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    """0 for the simulator, which has none."""
    has_caches: bool
    """Whether vLLM caches prefixes."""
    repeats: bool
    """Whether prompts begin alike, which the simulator is then given."""
    is_async: bool
    arrivals: tuple[float, ...]
    """ms, ascending, none at the end of an iteration."""
    prompts: tuple[int, ...]
    """Tokens."""
    outputs: tuple[int, ...]
    texts: tuple[str, ...]
    """By prompt, a letter for each of its full blocks; equal beginnings are equal prompts."""
    step_ms: float = 1.0
    """How long an iteration takes. Times are multiples of a power of 1/2: their sums are exact."""


class Step(NamedTuple):
    """One iteration, as it was scheduled."""

    begin: float
    """ms."""
    num_tokens: int
    computed: dict[int, int]
    """By request in the batch: tokens whose KV it has after the iteration."""
    free: int
    """KV blocks that no request holds when it begins."""
    preempted: tuple[int, ...]
    """Requests, since the one before."""


class SimulatedSteps:
    """The simulator, one event after another."""

    def __init__(self) -> None:
        self._loops = {
            False: compile_loop(run_events),
            True: compile_loop(run_events_with_caches, has_blocks=True),
        }

    def run(self, history: History) -> Iterator[Step]:
        """The steps of one instance of the simulator."""
        fleet = SimulatedFleet(
            mixed=(SimulatedPool(build_engine(history), 1),), has_connector=False
        )
        arrays, state = lay_out(prepare_fleet(fleet), build_trace(history), 0)
        requests, inst = arrays["requests"], arrays["instances"][0]
        loop = self._loops[history.repeats]
        formed: Formed | None = None
        before, done = Counts.read(requests), 0
        while np.isnan(requests["end"]).any():
            state["max_events"] = state["events"] + 1
            loop(state)
            requests["outcome"] = RequestOutcome.SERVED
            if formed and inst["iterations"] > done:
                yield from formed.expand(int(inst["iterations"]) - done)
                formed = None
            done = int(inst["iterations"])
            if formed is None and inst["in_flight"]:
                formed = Formed.read(history, arrays, before)
                before = Counts.read(requests)


class Counts(NamedTuple):
    computed: Any
    preemptions: Any

    @classmethod
    def read(cls, requests: Any) -> "Counts":
        return cls(requests["computed"].copy(), requests["preemptions"].copy())


class Formed(NamedTuple):
    """A batch of the simulator: one iteration, or many that decode."""

    first: Step
    history: History
    ahead: int
    """Blocks that the second iteration had taken when the first one began."""

    @classmethod
    def read(
        cls,
        history: History,
        arrays: dict[str, Any],
        before: Counts,
        i: int = 0,
        is_here: Any = True,
    ) -> "Formed":
        """The batch in flight on instance `i`; `before`: when the last one was. `is_here`: whether
        a request that computes its prompt does so there."""
        requests, slot, inst = arrays["requests"], arrays["slots"][i], arrays["instances"][i]
        computed = {}
        r = int(slot["oldest"]) if slot["decodes"] else NONE
        while r != NONE:
            one = requests[r]
            if one["end_step"] < LEFT_OUT:
                steps = int(one["end_step"] - slot["steps"])
                computed[r] = int(one["prompt"] + one["output"]) - steps
            r = int(one["younger"])
        changed = requests["computed"] != before.computed
        changed |= requests["preemptions"] > before.preemptions
        # What the next iteration computes has its blocks already.
        changed &= requests["is_whole"] == 0
        changed &= (requests["computed"] > 0) & np.isnan(requests["end"]) & is_here
        computed |= {int(r): int(requests["computed"][r]) for r in np.flatnonzero(changed)}
        preempted = np.repeat(
            np.arange(len(requests)), (requests["preemptions"] - before.preemptions) * is_here
        )
        step = Step(
            float(slot["begin"]),
            int(slot["tokens"] + slot["rows"]),
            computed,
            int(inst["free"] + inst["ahead"]),
            tuple(preempted.tolist()),
        )
        return cls(step, history, int(inst["ahead"]))

    def expand(self, iterations: int) -> Iterator[Step]:
        """Its steps: each member has one token more than in the one before."""
        step = self.first
        for at in range(iterations):
            if at:
                grown = sum(
                    tokens % self.history.block_size == 0 for tokens in step.computed.values()
                )
                computed = {r: tokens + 1 for r, tokens in step.computed.items()}
                step = Step(
                    step.begin + self.history.step_ms,
                    step.num_tokens,
                    computed,
                    step.free - grown - (self.ahead if at == 1 else 0),
                    (),
                )
            yield step


def build_engine(history: History) -> SimulatedEngine:
    """The engine of a history."""
    ms = (history.step_ms, history.step_ms)
    timing = EngineTiming(1.0, ms, 0.0, ms, (0.0,), schedules_ahead=history.is_async)
    return SimulatedEngine(
        timing,
        history.num_blocks * history.block_size,
        history.block_size,
        max_num_seqs=history.max_num_seqs,
        max_num_batched_tokens=history.max_num_batched_tokens,
        prefix_caching=history.has_caches,
    )


def build_trace(history: History) -> Trace:
    blocks = None
    if history.repeats:
        known: dict[str, int] = {}
        parts = [[t[: end + 1] for end in range(len(t))] for t in history.texts]
        numbers = [known.setdefault(part, len(known)) for each in parts for part in each]
        starts = np.cumsum([0, *(len(each) for each in parts)])
        blocks = PromptBlocks(
            history.block_size, starts, np.array(numbers, np.int64), max(len(known), 1)
        )
    return Trace(
        np.array(history.arrivals),
        np.array(history.prompts),
        np.array(history.outputs),
        blocks=blocks,
    )


class EmulatedSteps:
    """The emulated engine's scheduler, which does not schedule ahead."""

    def run(self, history: History) -> Iterator[Step]:
        """The steps of one engine."""
        limits = EngineLimits(
            history.max_num_seqs, history.max_num_batched_tokens, history.has_caches
        )
        pool = BlockPool(history.num_blocks, history.block_size)
        scheduler = EmulatedScheduler(limits, pool)
        threshold = history.long_prefill_token_threshold
        scheduler.apply_scheduling(RoleSchedulingConfig(long_prefill_token_threshold=threshold))
        rows = zip(_list_prompts(history), history.outputs, strict=True)
        sequences = [
            Sequence(EngineRequest(str(r), array("I", tokens), output, ignore_eos=True))
            for r, (tokens, output) in enumerate(rows)
        ]
        coming = deque(zip(history.arrivals, sequences, strict=True))
        now, counts = 0.0, np.zeros(len(sequences), int)
        while coming or scheduler.running or scheduler.num_waiting:
            while coming and coming[0][0] <= now:
                scheduler.add(coming.popleft()[1])
            step = scheduler.schedule()
            if step.scheduled:
                before, counts = counts, np.array([each.num_preemptions for each in sequences])
                yield Step(
                    now,
                    step.num_tokens,
                    {int(each.request.id): each.num_computed + n for each, n in step.scheduled},
                    pool.num_free,
                    tuple(np.repeat(np.arange(len(sequences)), counts - before).tolist()),
                )
                scheduler.complete(step)
                now += 1
            elif not scheduler.num_waiting:
                now = coming[0][0]


class VllmSteps:
    """vLLM's scheduler."""

    def __init__(self) -> None:
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        from cleave.local.tiny_model import build

        init_none_hash(sha256)
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "tiny"
            build(model)
            self.config = VllmConfig(
                model_config=ModelConfig(str(model), dtype="float32", max_model_len=_MAX_LEN),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=256,
                    max_num_batched_tokens=_MAX_LEN,
                    max_model_len=_MAX_LEN,
                    is_encoder_decoder=False,
                ),
                cache_config=CacheConfig(),
            )
            self._structured_output = StructuredOutputManager(self.config)

    def run(self, history: History) -> Iterator[Step]:
        """The steps of one engine."""
        scheduler = self.build_scheduler(history)
        coming = deque(self.build_requests(history))
        in_flight: deque[tuple[Any, Any]] = deque()
        now, preempted = 0.0, list[int]()
        step: Step | None = None
        while True:
            while coming and coming[0].arrival_time <= now:
                scheduler.add_request(coming.popleft())
            if scheduler.has_requests():
                output = scheduler.schedule()
                preempted += sorted(map(int, output.preempted_req_ids))
                begin = now + any(each.total_num_scheduled_tokens for each, _ in in_flight)
                in_flight.append((output, sample(scheduler, output)))
                if output.total_num_scheduled_tokens:
                    step = read_step(scheduler, output, begin, preempted)
                    preempted = []
                if step and begin == now:
                    yield step
                    step = None
                if len(in_flight) <= history.is_async:
                    continue
            elif not in_flight:
                if not coming:
                    return
                now = coming[0].arrival_time
                continue
            output, sampled = in_flight.popleft()
            now += output.total_num_scheduled_tokens > 0
            scheduler.update_from_output(output, sampled)
            if step:
                yield step._replace(free=count_free(scheduler))
                step = None

    def build_scheduler(self, history: History) -> Any:
        import torch
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        config, size = self.config, history.block_size
        config.scheduler_config.max_num_seqs = history.max_num_seqs
        config.scheduler_config.max_num_batched_tokens = history.max_num_batched_tokens
        threshold = history.long_prefill_token_threshold
        config.scheduler_config.long_prefill_token_threshold = threshold
        config.scheduler_config.async_scheduling = history.is_async
        config.cache_config.block_size = size
        config.cache_config.enable_prefix_caching = history.has_caches
        # One block is never given out.
        num_blocks = config.cache_config.num_gpu_blocks = history.num_blocks + 1
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return (AsyncScheduler if history.is_async else Scheduler)(
            config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=self._structured_output,
            block_size=size,
        )

    def build_requests(self, history: History) -> Iterator[Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        size = history.block_size
        hasher = get_request_block_hasher(size, sha256) if history.has_caches else None
        rows = zip(history.arrivals, _list_prompts(history), history.outputs, strict=True)
        for number, (arrival, tokens, output) in enumerate(rows):
            yield Request(
                str(number),
                tokens,
                SamplingParams(max_tokens=output, ignore_eos=True),
                None,
                arrival_time=arrival,
                block_hasher=hasher,
            )


def _list_prompts(history: History) -> Iterator[list[int]]:
    """Their tokens."""
    for number, (prompt, text) in enumerate(zip(history.prompts, history.texts, strict=True)):
        tokens = [ord(letter) for letter in text for _ in range(history.block_size)]
        # What follows the blocks is the request's own.
        yield tokens + [1_000 + number] * (prompt - len(tokens))


def read_step(scheduler: Any, output: Any, begin: float, preempted: list[int]) -> Step:
    return Step(
        begin,
        output.total_num_scheduled_tokens,
        {
            int(name): scheduler.requests[name].num_computed_tokens
            for name in output.num_scheduled_tokens
        },
        count_free(scheduler),
        tuple(preempted),
    )


def count_free(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def sample(scheduler: Any, output: Any) -> Any:
    """What a model returns: a token for each request whose prompt is computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    # No token of an answer is one of a prompt.
    sampled = [
        [] if scheduler.requests[name].is_prefill_chunk else [1_000_000 + int(name)]
        for name in names
    ]
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
