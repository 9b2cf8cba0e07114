"""vLLM's scheduler, which follows terms that change while it runs.

Named to vLLM by the agent (`--scheduler-cls`) when terms are stated for a role. vLLM's own classes
do the scheduling; what is added calls `cleave.policy` and goes through few doors, each held by a
test against the pinned version: the queue of waiting requests, which vLLM asks whether it is empty
just before it looks at its first; the limits of a pass, which vLLM reads in each; and the order of
running requests, of which vLLM preempts the last one.

What is hard: the queue says it is empty while its first request may not join yet, so nothing of
vLLM's loop is repeated here; and a request that may not join now must be able to join some day.
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

from cleave.policy.admission import is_spared
from cleave_worker.scheduling import terms
from cleave_worker.scheduling.admitting import Admitting, Lengths
from cleave_worker.scheduling.terms import Terms, find_limit
from cleave_worker.scheduling.terms_page import ENV, TermsPage
from cleave_worker.scheduling.window import Window


def make_scheduler(vllm_config: Any, **more: Any) -> SchedulerInterface:  # noqa: ANN401
    """vLLM's scheduler for this configuration, following the terms page of the environment."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (FollowingAsyncScheduler if is_async else FollowingScheduler)(vllm_config, **more)


class WaitingQueue(FCFSRequestQueue):
    """Waiting requests in the order of the terms; empty for vLLM while the first may not join."""

    def __init__(self, has_seat: Callable[[], bool], may_join: Callable[[Request], bool]) -> None:
        super().__init__()
        self._has_seat = has_seat
        self.window: Window[Request] = Window(self, _tokens_to_compute)
        self._may_join = may_join

    def __bool__(self) -> bool:
        # Without a seat nobody is looked at, so that the batch is sorted when somebody can start.
        if not len(self) or not self._has_seat():
            return False
        self.window.sort()
        return self._may_join(self[0])

    def peek_request(self) -> Request:
        """The first; raises IndexError when there is none."""
        return self[0]

    def pop_request(self) -> Request:
        """Take the first out."""
        request = super().pop_request()
        self.window.took()
        return request

    def prepend_request(self, request: Request) -> None:
        """Put one before all others."""
        super().prepend_request(request)
        self.window.put_back()

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put some before all others, the last of them first."""
        before = len(self)
        super().prepend_requests(requests)
        self.window.put_back(len(self) - before)

    def remove_request(self, request: Request) -> None:
        """Take one out, wherever it is."""
        self.window.leave((request,))
        super().remove_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take some out, wherever they are."""
        gone = set(requests)
        self.window.leave(gone)
        super().remove_requests(gone)


class _Following(Scheduler):
    """What both schedulers add to vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ValueError("--scheduling-policy priority and --scheduling exclude each other")
        path = os.environ.get(ENV)
        self._page = TermsPage(Path(path)) if path else None
        self._admitting = Admitting()
        self._started_tokens: int = self.max_num_scheduled_tokens
        self._started_seqs: int = self.max_num_active_reqs
        self._started_threshold = self.scheduler_config.long_prefill_token_threshold
        self.waiting = WaitingQueue(self._has_seat, self._may_join)
        self.follow(terms.DEFAULT)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One pass of vLLM's, by the newest terms."""
        if self._page and (news := self._page.news()):
            self.follow(news)
        if self._terms.preemption_limit:
            # The last one is preempted first.
            self.running.sort(key=self._by_claim)
        return super().schedule(throttle_prefills)

    def follow(self, terms: Terms) -> None:
        """Schedule like this from the next pass on; what runs goes on running."""
        self._terms = terms
        self.max_num_scheduled_tokens = find_limit(
            terms.max_num_batched_tokens, self._started_tokens
        )
        self.max_num_active_reqs = find_limit(terms.max_num_seqs, self._started_seqs)
        self.scheduler_config.long_prefill_token_threshold = (
            terms.long_prefill_token_threshold or self._started_threshold
        )
        self.waiting.window.follow(terms.order, terms.prefill_sched_batch)

    def _by_claim(self, request: Request) -> tuple[bool, float]:
        spared = is_spared(request.num_preemptions, self._terms.preemption_limit)
        return not spared, request.arrival_time

    def _has_seat(self) -> bool:
        taken: int = len(self.running) + self.num_waiting_for_streaming_input
        return taken < self.max_num_active_reqs

    def _may_join(self, request: Request) -> bool:
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        admission = self._terms.admission
        return self._admitting.may_join(admission, free, _lengths(request), self._decoding)

    def _decoding(self) -> Iterator[Lengths]:
        return (_lengths(request) for request in self.running if not request.is_prefill_chunk)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:  # noqa: ANN401
        if request.status is RequestStatus.FINISHED_STOPPED:
            self._admitting.learn(_lengths(request))
        return super()._free_request(request, delay_free_blocks)


class FollowingScheduler(_Following):
    """vLLM's scheduler that waits for each pass."""


class FollowingAsyncScheduler(_Following, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the passes."""


def _lengths(request: Request) -> Lengths:
    return Lengths(request.num_prompt_tokens, len(request.output_token_ids), request.max_tokens)


def _tokens_to_compute(request: Request) -> int:
    params = request.kv_transfer_params
    if params and params.get("do_remote_prefill"):
        return 1
    tokens: int = request.num_tokens
    return tokens
