"""vLLM's scheduler with order, limits and admission that change while it runs.

The agent names it to vLLM (`--scheduler-cls`) when a role has a scheduling configuration. vLLM's
own classes schedule; the additions call `cleave.policy` at three points, each covered by a test
against the pinned version:

1. The queue of waiting requests: vLLM checks that it is not empty before it peeks at the first.
2. The limits of a step, which vLLM reads in each step.
3. The order of running requests, of which vLLM preempts the last one.

The queue reports that it is empty while its first request may not join yet, so this module repeats
nothing of vLLM's loop; each request must be admitted eventually.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from cleave.policy.admission import is_protected
from cleave_worker.scheduling import config as scheduling_config
from cleave_worker.scheduling.admission import EngineAdmission, RequestLengths
from cleave_worker.scheduling.config import RoleSchedulingConfig, clamp_limit
from cleave_worker.scheduling.config_page import ENV, SchedulingPage
from cleave_worker.scheduling.window import SortedWindow


def make_scheduler(vllm_config: Any, **more: Any) -> SchedulerInterface:  # noqa: ANN401
    """Return vLLM's scheduler for this configuration; it reads the scheduling page of the agent."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (RoleAsyncScheduler if is_async else RoleScheduler)(vllm_config, **more)


class WaitingQueue(FCFSRequestQueue):
    """Waiting requests in the configured order; empty for vLLM while the first may not join."""

    def __init__(self, has_seat: Callable[[], bool], may_join: Callable[[Request], bool]) -> None:
        super().__init__()
        self._has_seat = has_seat
        self.window: SortedWindow[Request] = SortedWindow(self, _count_tokens_to_compute)
        self._may_join = may_join

    def __bool__(self) -> bool:
        # Sorted only when the batch has a free seat and a request can start.
        if not len(self) or not self._has_seat():
            return False
        self.window.sort()
        return self._may_join(self[0])

    def peek_request(self) -> Request:
        """Return the first request. Raises IndexError when there is none."""
        return self[0]

    def pop_request(self) -> Request:
        """Remove and return the first request."""
        request = super().pop_request()
        self.window.record_pop()
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
        self.waiting = WaitingQueue(self._has_seat, self._may_join)
        self.apply_scheduling(scheduling_config.DEFAULT)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step with the newest configuration."""
        if self._scheduling_page and (config := self._scheduling_page.read_if_changed()):
            self.apply_scheduling(config)
        if self._scheduling.preemption_limit:
            # vLLM preempts the last one first.
            self.running.sort(key=self._get_preemption_key)
        return super().schedule(throttle_prefills)

    def apply_scheduling(self, config: RoleSchedulingConfig) -> None:
        """Use this configuration from the next step on; running requests continue."""
        self._scheduling = config
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
        return self._admission.may_join(policy, free, lengths, self._iterate_decoding)

    def _iterate_decoding(self) -> Iterator[RequestLengths]:
        return (_get_lengths(request) for request in self.running if not request.is_prefill_chunk)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:  # noqa: ANN401
        if request.status is RequestStatus.FINISHED_STOPPED:
            self._admission.learn(_get_lengths(request))
        return super()._free_request(request, delay_free_blocks)


class RoleScheduler(_RoleSchedulerBase):
    """vLLM's synchronous scheduler with a scheduling configuration."""


class RoleAsyncScheduler(_RoleSchedulerBase, AsyncScheduler):
    """vLLM's asynchronous scheduler with a scheduling configuration."""


def _get_lengths(request: Request) -> RequestLengths:
    generated = len(request.output_token_ids)
    return RequestLengths(request.num_prompt_tokens, generated, request.max_tokens)


def _count_tokens_to_compute(request: Request) -> int:
    params = request.kv_transfer_params or {}
    return 1 if params.get("do_remote_prefill") else int(request.num_tokens)
