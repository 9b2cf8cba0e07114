"""One random history of requests through a prefill and a decode instance: vLLM's schedulers, with a
connector that moves nothing, and the simulator's.

What is hard: a pull takes time of its own. It begins when the decode side has scheduled it, and its
end is known on both sides when the iteration that runs then is over, or at once on an idle one.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from step_by_step import (
    Counts,
    Formed,
    History,
    Step,
    VllmSteps,
    build_engine,
    build_trace,
    count_free,
    read_step,
    sample,
)

from cleave.simulator.events import run_events, run_events_with_caches
from cleave.simulator.fleet import SimulatedFleet, SimulatedPool, SimulatedTransfer
from cleave.simulator.outcome import RequestOutcome
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet


class PairHistory(NamedTuple):
    """Requests, and the instances that compute their prompts and answers."""

    prefill: History
    decode: History
    """The same requests on another engine."""
    pull_ms: float
    token_ms: float
    """A pull takes `pull_ms`, and this for each token in its blocks."""


class SimulatedPair:
    """The simulator, one event after another."""

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async
        """Whether both instances schedule ahead."""
        self._loops = {
            False: compile_loop(run_events),
            True: compile_loop(run_events_with_caches, has_blocks=True),
        }

    def run(self, history: PairHistory) -> tuple[list[Step], list[Step]]:
        """The steps of both instances."""
        fleet = SimulatedFleet(
            (SimulatedPool(build_engine(history.prefill), 1),),
            (SimulatedPool(build_engine(history.decode), 1),),
            transfer=SimulatedTransfer(history.pull_ms, history.token_ms, is_shared=False),
        )
        arrays, state = lay_out(prepare_fleet(fleet), build_trace(history.prefill), 0)
        requests, instances = arrays["requests"], arrays["instances"]
        loop = self._loops[history.prefill.repeats]
        found: tuple[list[Step], list[Step]] = [], []
        formed: list[Formed | None] = [None, None]
        before, done = [Counts.read(requests)] * 2, [0, 0]
        while np.isnan(requests["end"]).any():
            state["max_events"] = state["events"] + 1
            loop(state)
            requests["outcome"] = RequestOutcome.SERVED
            for i, own in enumerate((history.prefill, history.decode)):
                iterations = int(instances[i]["iterations"])
                batch = formed[i]
                if batch and iterations > done[i]:
                    found[i].extend(batch.expand(iterations - done[i]))
                    formed[i] = None
                done[i] = iterations
                if formed[i] is None and instances[i]["in_flight"]:
                    # What is computed again on the decode instance has had a token.
                    is_first = np.isnan(requests["prefill_end" if i == 0 else "first_token"])
                    formed[i] = Formed.read(own, arrays, before[i], i, is_first == (i == 0))
                    before[i] = Counts.read(requests)
        return found


@dataclass
class _Batch:
    output: Any
    sampled: Any
    end: float


class _Engine:
    """One of vLLM's schedulers in the loop of its engine (`EngineCore.step_with_batch_queue`)."""

    def __init__(self, scheduler: Any, history: History) -> None:
        self.scheduler, self._history = scheduler, history
        self.steps: list[Step] = []
        self.sent: list[str] = []
        self.received: list[str] = []
        """Whose transfer is over, which the next output tells."""
        self.ended: list[int] = []
        self._in_flight: deque[_Batch] = deque()
        self._preempted: list[int] = []
        self._ahead: Step | None = None

    @property
    def next_ms(self) -> float:
        """When its oldest iteration ends."""
        return self._in_flight[0].end if self._in_flight else float("inf")

    def advance(self, now: float) -> None:
        """End what is over, and schedule until an iteration runs or there is nothing to do."""
        while True:
            if self._in_flight and self._in_flight[0].end <= now:
                is_empty = self._complete()
                if is_empty and not self._in_flight and not self._schedule(now):
                    # Polls until something happens.
                    self._complete()
                    return
            elif len(self._in_flight) <= self._history.is_async and self.scheduler.has_requests():
                self._schedule(now)
            else:
                return

    def _schedule(self, now: float) -> bool:
        scheduler = self.scheduler
        output = scheduler.schedule()
        tokens = output.total_num_scheduled_tokens
        self._preempted += sorted(map(int, output.preempted_req_ids))
        begin = self._in_flight[-1].end if self._in_flight else now
        end = begin + (self._history.step_ms if tokens else 0.0)
        self._in_flight.append(_Batch(output, sample(scheduler, output), end))
        if tokens:
            step = read_step(scheduler, output, begin, self._preempted)
            self._preempted = []
            if begin == now:
                self.steps.append(step)
            else:
                self._ahead = step
        return tokens > 0 or bool(output.preempted_req_ids)

    def _complete(self) -> bool:
        """End the oldest batch; whether it changed nothing."""
        from pair_connector import KVConnectorOutput

        batch = self._in_flight.popleft()
        transfers = KVConnectorOutput(self.sent, self.received)  # type: ignore[arg-type]
        is_empty = not (self.sent or self.received or batch.output.total_num_scheduled_tokens)
        batch.sampled.kv_connector_output = transfers
        self.sent, self.received = [], []
        for outputs in self.scheduler.update_from_output(batch.output, batch.sampled).values():
            self.ended += [int(each.request_id) for each in outputs.outputs if each.finished]
        if self._ahead:
            self.steps.append(self._ahead._replace(free=count_free(self.scheduler)))
            self._ahead = None
        return is_empty


class VllmPair:
    """vLLM's schedulers."""

    def __init__(self) -> None:
        from vllm.config import KVTransferConfig

        self._vllm = VllmSteps()
        self._vllm.config.kv_transfer_config = KVTransferConfig(
            kv_connector="PairConnector",
            kv_connector_module_path="pair_connector",
            kv_role="kv_both",
        )

    def run(self, history: PairHistory) -> tuple[list[Step], list[Step]]:
        """The steps of both instances."""
        both = prefill, decode = [
            _Engine(self._vllm.build_scheduler(each), each) for each in history[:2]
        ]
        first = dict(enumerate(self._vllm.build_requests(_shorten(history.prefill))))
        second = dict(enumerate(self._vllm.build_requests(history.decode)))
        coming, pulls = deque(enumerate(history.prefill.arrivals)), list[tuple[float, int, str]]()
        order = itertools.count()
        while True:
            arrival = coming[0][1] if coming else float("inf")
            now = min(arrival, prefill.next_ms, decode.next_ms, *(each[0] for each in pulls[:1]))
            if now == float("inf"):
                return prefill.steps, decode.steps
            while coming and coming[0][1] <= now:
                request = first[coming.popleft()[0]]
                request.kv_transfer_params = {"do_remote_decode": True}
                prefill.scheduler.add_request(request)
            while pulls and pulls[0][0] <= now:
                name = heapq.heappop(pulls)[2]
                prefill.sent.append(name)
                decode.received.append(name)
            for each in both:
                each.advance(now)
                for number in prefill.ended:
                    second[number].kv_transfer_params = {"do_remote_prefill": True}
                    decode.scheduler.add_request(second[number])
                prefill.ended = []
            connector = decode.scheduler.connector
            size = history.prefill.block_size
            for name, tokens in connector.started:
                ms = history.pull_ms + -(-tokens // size) * size * history.token_ms
                heapq.heappush(pulls, (now + ms, next(order), name))
            connector.started = []


def _shorten(history: History) -> History:
    return replace(history, outputs=(1,) * len(history.outputs))
