"""vLLM's scheduler with order, limits and admission that change while it runs.

The agent names it to vLLM (`--scheduler-cls`) when a role has a scheduling configuration. vLLM's
own classes schedule; the additions call `cleave.policy` at four points, each covered by a test
against the pinned version:

1. The queue of waiting requests: vLLM checks that it is not empty before it peeks at the first.
2. The limits of a step, which vLLM reads in each step.
3. The order of running requests, of which vLLM preempts the last one.
4. The beginning and end of a step, whose times predict those of others (`IterationTimes`).

The queue reports that it is empty while its first request may not join yet, so this module repeats
nothing of vLLM's loop; each request must be admitted eventually.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cleave.policy.admission import Admission, is_protected
from cleave.policy.prompt_order import PrefillOrder, is_late
from cleave.policy.request_targets import NO_TARGETS, RequestTargets, read_targets
from cleave_worker.scheduling import config as scheduling_config
from cleave_worker.scheduling.admission import EngineAdmission, RequestLengths
from cleave_worker.scheduling.config import RoleSchedulingConfig, clamp_limit
from cleave_worker.scheduling.config_page import ENV, SchedulingPage
from cleave_worker.scheduling.iteration_times import IterationTimes
from cleave_worker.scheduling.window import SortedWindow


def make_scheduler(vllm_config: Any, **more: Any) -> SchedulerInterface:  # noqa: ANN401
    """Return vLLM's scheduler for this configuration; it reads the scheduling page of the agent."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (RoleAsyncScheduler if is_async else RoleScheduler)(vllm_config, **more)


class WaitingQueue(FCFSRequestQueue):
    """Waiting requests in the configured order; empty for vLLM while the first may not join."""

    def __init__(
        self,
        has_seat: Callable[[], bool],
        may_join: Callable[[Request], bool],
        is_late: Callable[[Request], bool],
    ) -> None:
        super().__init__()
        self._has_seat = has_seat
        self.window: SortedWindow[Request] = SortedWindow(self, _count_tokens_to_compute, is_late)
        self._may_join = may_join

    def __bool__(self) -> bool:
        # Sorted only when the batch has a free seat and a request can start.
        if not len(self) or not self._has_seat():
            return False
        self.window.sort()
        return self._may_join(self[0])

    def add_request(self, request: Request) -> None:
        """Add a new request behind all that are not late."""
        self.window.add(request)

    def peek_request(self) -> Request:
        """Return the first request. Raises IndexError when there is none."""
        return self[0]

    def pop_request(self) -> Request:
        """Remove and return the first request."""
        request = super().pop_request()
        self.window.record_pop(request)
        return request

    def prepend_request(self, request: Request) -> None:
        """Put one request before all others."""
        super().prepend_request(request)
        self.window.record_prepend()

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests before all others, the last of them first."""
        length = len(self)
        super().prepend_requests(requests)
        self.window.record_prepend(len(self) - length)

    def remove_request(self, request: Request) -> None:
        """Remove one request at any position."""
        self.window.record_removal((request,))
        super().remove_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests at any position."""
        removed = set(requests)
        self.window.record_removal(removed)
        super().remove_requests(removed)


class _RoleSchedulerBase(Scheduler):
    """The additions of both schedulers to vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ValueError("--scheduling-policy priority and --scheduling exclude each other")
        path = os.environ.get(ENV)
        self._scheduling_page = SchedulingPage(Path(path)) if path else None
        self._admission = EngineAdmission()
        self._initial_max_tokens: int = self.max_num_scheduled_tokens
        self._initial_max_seqs: int = self.max_num_active_reqs
        self._initial_prefill_threshold = self.scheduler_config.long_prefill_token_threshold
        self._times = IterationTimes(self.parallel_config.pipeline_parallel_size)
        self._steps: dict[int, tuple[float, int, int]] = {}
        """Steps that run: when each was scheduled, its prompt tokens, tokens of all blocks in use;
        by the identity of vLLM's object for it."""
        self._first_tokens: dict[str, float] = {}
        """When requests that decode got their first token, by their ids."""
        self.waiting = WaitingQueue(self._has_seat, self._may_join, self._is_late)
        self.apply_scheduling(scheduling_config.DEFAULT)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step with the newest configuration."""
        if self._scheduling_page and (config := self._scheduling_page.read_if_changed()):
            self.apply_scheduling(config)
        if self._scheduling.preemption_limit:
            # vLLM preempts the last one first.
            self.running.sort(key=self._get_preemption_key)
        output = super().schedule(throttle_prefills)
        if self._observes_times and output.total_num_scheduled_tokens:
            prompt_tokens = self._count_prompts(output)
            self._steps[id(output)] = time.monotonic(), prompt_tokens, self._used_tokens
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:  # noqa: ANN401
        """Take the tokens of one step, and how long it took."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if step := self._steps.pop(id(scheduler_output), None):
            (scheduled_s, prompt_tokens, used_tokens), now = step, time.monotonic()
            self._times.record(scheduled_s, now, prompt_tokens, used_tokens)
            for request in self.running:
                if request.num_output_tokens:
                    self._first_tokens.setdefault(request.request_id, now)
        return outputs

    def apply_scheduling(self, config: RoleSchedulingConfig) -> None:
        """Use this configuration from the next step on; running requests continue."""
        self._scheduling = config
        is_in_time = config.order is PrefillOrder.IN_TIME
        self._observes_times = is_in_time or config.admission is Admission.WITHIN_TPOT
        self._steps.clear()
        self.max_num_scheduled_tokens = clamp_limit(
            config.max_num_batched_tokens, self._initial_max_tokens
        )
        self.max_num_active_reqs = clamp_limit(config.max_num_seqs, self._initial_max_seqs)
        self.scheduler_config.long_prefill_token_threshold = (
            config.long_prefill_token_threshold or self._initial_prefill_threshold
        )
        self.waiting.window.set_order(config.order, config.prefill_sched_batch)

    def _get_preemption_key(self, request: Request) -> tuple[bool, float]:
        is_spared = is_protected(request.num_preemptions, self._scheduling.preemption_limit)
        return not is_spared, request.arrival_time

    def _has_seat(self) -> bool:
        taken: int = len(self.running) + self.num_waiting_for_streaming_input
        return taken < self.max_num_active_reqs

    def _may_join(self, request: Request) -> bool:
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        policy, lengths = self._scheduling.admission, _get_lengths(request)
        if policy is Admission.WITHIN_TPOT:
            if self._is_idle() or request.num_preemptions or _is_decoded_elsewhere(request):
                return True
            return self._keeps_tpot(request)
        return self._admission.may_join(policy, free, lengths, self._iterate_decoding)

    def _is_idle(self) -> bool:
        """Whether nothing runs, and no KV is on its way of what will run."""
        pulls = RequestStatus.WAITING_FOR_REMOTE_KVS
        return not self.running and all(r.status is not pulls for r in self.requests.values())

    def _keeps_tpot(self, request: Request) -> bool:
        own, times = request.num_tokens, self._times
        decode_ms = times.predict_decode_ms(self._used_tokens + own)
        alone_ms = times.predict_decode_ms(own)
        prompt_ms = self._predict_prompt_ms(request)
        now, started = time.monotonic(), self._first_tokens
        decoding = (
            (_get_lengths(each), (now - started[each.request_id]) * 1000)
            for each in reversed(self.running)
            if each.request_id in started
        )
        tpot_ms, late = _get_targets(request).tpot_ms, self.waiting.window.is_deferred(request)
        return self._admission.keeps_tpot(decode_ms, alone_ms, prompt_ms, tpot_ms, late, decoding)

    def _predict_prompt_ms(self, request: Request) -> float:
        """ms for what is not cached here; 0 if it comes from elsewhere, or a part of it that is not
        known yet."""
        params, tokens = request.kv_transfer_params or {}, request.num_tokens
        if params.get("do_remote_prefill") or params.get("prefix_source"):
            return 0.0
        manager = self.kv_cache_manager
        if manager.prefix_cache_lookup_enabled(request):
            # Without the function around it, which may report the blocks as events.
            hit = manager.coordinator.find_longest_cache_hit(request.block_hashes, tokens - 1)
            tokens -= hit[1]
        return self._times.predict_prompt_ms(tokens, self.max_num_scheduled_tokens)

    def _is_late(self, request: Request) -> bool:
        """Whether it misses its TTFT target even if it is served now."""
        targets = _get_targets(request)
        if request.num_output_tokens:
            return False
        is_handed_off = _is_handed_off(request)
        own_ms = targets.tpot_ms if is_handed_off else self._predict_prompt_ms(request)
        waited_ms = (time.time() - request.arrival_time) * 1000
        return is_late(targets.ttft_left_ms - waited_ms, own_ms)

    @property
    def _used_tokens(self) -> int:
        """Tokens of all KV blocks in use."""
        pool = self.kv_cache_manager.block_pool
        return int((pool.num_gpu_blocks - pool.get_num_free_blocks()) * self.block_size)

    def _count_prompts(self, output: SchedulerOutput) -> int:
        """Tokens of prompts, and of requests that are computed again, in a step; as few as a
        decoding request may have count as such."""
        fewest = 1 + self.num_spec_tokens
        return sum(count for count in output.num_scheduled_tokens.values() if count > fewest)

    def _iterate_decoding(self) -> Iterator[RequestLengths]:
        return (_get_lengths(request) for request in self.running if not request.is_prefill_chunk)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:  # noqa: ANN401
        if request.status is RequestStatus.FINISHED_STOPPED:
            self._admission.learn(_get_lengths(request))
        self._first_tokens.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)


class RoleScheduler(_RoleSchedulerBase):
    """vLLM's synchronous scheduler with a scheduling configuration."""


class RoleAsyncScheduler(_RoleSchedulerBase, AsyncScheduler):
    """vLLM's asynchronous scheduler with a scheduling configuration."""


def _get_lengths(request: Request) -> RequestLengths:
    generated = len(request.output_token_ids)
    return RequestLengths(request.num_prompt_tokens, generated, request.max_tokens)


def _count_tokens_to_compute(request: Request) -> int:
    return 1 if _is_handed_off(request) else int(request.num_tokens)


def _is_handed_off(request: Request) -> bool:
    """Whether another engine has computed its prompt."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def _is_decoded_elsewhere(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _get_targets(request: Request) -> RequestTargets:
    params = request.sampling_params
    return read_targets(params.extra_args) if params is not None else NO_TARGETS
