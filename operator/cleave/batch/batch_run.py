"""Runs a batch: sends each request that has no result yet, and writes its result.

Called by `cleave batch`. `pacer` says how many run, `reply` what an answer means, `result_files` is
the state. Memory is bounded: at most `max_running` requests are held, those that wait to be sent
again included. A run ends when all requests have results, when its time is over, or when it is
stopped; then requests in flight get a moment to end, and the next run sends those that do not.
"""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from cleave.batch.batch_file import BatchLine
from cleave.batch.pacer import Pacer
from cleave.batch.reply import Reply, Verdict, classify_reply, read_error_code, read_usage
from cleave.batch.result_files import ResultFiles, build_error_line, build_response_line

STOP_GRACE_S = 10.0
"""For requests in flight when a run is stopped; pods get 30 s."""
SYNC_INTERVAL_S = 1.0
_TRY_DELAY_S = 1.0
"""Before a request is sent again after an error; twice as long each time."""


class UnauthorizedError(RuntimeError):
    """The gateway refuses the API key."""


@dataclass(slots=True)
class BatchProgress:
    """What has been done, in this run and those before."""

    total: int
    num_succeeded: int = 0
    num_failed: int = 0
    num_running: int = 0
    num_refusals: int = 0
    """Of this run: requests that were sent again because capacity was short."""
    prompt_tokens: int = 0
    """Of this run's answers; so is the next."""
    output_tokens: int = 0
    obstacle: str = ""
    """Why the latest request that was refused was; empty: one has been answered since."""

    @property
    def num_done(self) -> int:
        """Requests with a result."""
        return self.num_succeeded + self.num_failed

    @property
    def num_left(self) -> int:
        """Requests without a result."""
        return self.total - self.num_done


@dataclass(slots=True)
class _Request:
    """A request that this run holds."""

    line: BatchLine
    num_tries: int = 0
    """Refusals not counted."""


class BatchRun:
    """One run of a batch. Call `run` once."""

    def __init__(
        self,
        lines: Iterator[BatchLine],
        files: ResultFiles,
        send: Callable[[BatchLine], Awaitable[Reply]],
        progress: BatchProgress,
        *,
        max_running: int,
        rng: random.Random,
    ) -> None:
        """`lines`: those with a result are skipped. `send`: of the client. `files`: are open."""
        self._lines = lines
        self._files = files
        self._send = send
        self._progress = progress
        self._pacer = Pacer(max_running, rng)
        self._again: list[tuple[float, int, _Request]] = []
        """Requests to be sent again, with the time and their line, a heap."""
        self._max_running = max_running
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """A request has ended, or the run is to stop."""
        self._stopped = False
        self._fault: Exception | None = None
        """Why no request may be sent any more."""

    def stop(self) -> None:
        """Send no more requests; `run` returns within STOP_GRACE_S."""
        self._stopped = True
        self._changed.set()

    async def run(self, timeout_s: float) -> None:
        """Run until all requests have results, or `timeout_s` are over, or `stop` is called.
        Raises UnauthorizedError, ResultFilesError, BatchFileError."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        syncing = asyncio.create_task(self._sync_files())
        try:
            while not self._stopped and self._fault is None and (now := clock()) < deadline:
                self._changed.clear()
                may_start = self._pacer.may_start(now)
                request = self._take(now) if may_start else None
                if request is not None:
                    self._start(request)
                elif self._tasks or self._again or not may_start:
                    # Of one time: read again, it may be past that of the next request by now.
                    await self._wait_for_change(self._find_next_time(now, deadline))
                else:
                    break
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        finally:
            syncing.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(syncing, *self._tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    def _take(self, now: float) -> _Request | None:
        """The next request to send: one that is due again, else the next line; None: none now."""
        if self._again and self._again[0][0] <= now:
            return heapq.heappop(self._again)[2]
        if len(self._again) + self._pacer.num_running >= self._max_running:
            return None
        for line in self._lines:
            if not self._files.is_done(line.custom_id):
                return _Request(line)
        return None

    def _find_next_time(self, now: float, deadline: float) -> float:
        """When something may be sent if no request ends before."""
        resume_at = self._pacer.resume_at
        due_at = max(self._again[0][0], resume_at) if self._again else resume_at
        return min(due_at, deadline) if due_at > now else deadline

    async def _wait_for_change(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _start(self, request: _Request) -> None:
        self._pacer.start()
        task = asyncio.create_task(self._send_one(request))
        self._tasks.add(task)
        task.add_done_callback(self._handle_end)

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pacer.finish()
        self._progress.num_running = len(self._tasks)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = error if isinstance(error, Exception) else RuntimeError(str(error))
        self._changed.set()

    async def _send_one(self, request: _Request) -> None:
        clock, line, pacer = asyncio.get_running_loop().time, request.line, self._pacer
        self._progress.num_running = len(self._tasks)
        sent_at = clock()
        reply = await self._send(line)
        verdict = classify_reply(reply, request.num_tries + 1)
        if verdict is Verdict.UNAUTHORIZED:
            raise UnauthorizedError(f"status {reply.status}: no valid API key")
        if verdict is Verdict.REFUSED:
            self._progress.num_refusals += 1
            self._progress.obstacle = reply.fault or f"status {reply.status}"
            delay_s = pacer.reduce(sent_at, clock(), reply.retry_after_s)
            heapq.heappush(self._again, (clock() + delay_s, line.number, request))
            return
        if verdict is Verdict.RETRY:
            # No reason to send more at a time.
            delay_s = _TRY_DELAY_S * 2**request.num_tries
            request.num_tries += 1
            heapq.heappush(self._again, (clock() + delay_s, line.number, request))
            return
        pacer.grow()
        self._progress.obstacle = ""
        self._record(line, reply, verdict)

    def _record(self, line: BatchLine, reply: Reply, verdict: Verdict) -> None:
        progress, files = self._progress, self._files
        succeeded = verdict is Verdict.SUCCEEDED
        if reply.status:
            result = build_response_line(line, reply.status, reply.request_id, reply.body)
        else:
            code = read_error_code(reply.body) or "no_response"
            result = build_error_line(line, code, reply.fault)
        files.add(line, result, succeeded)
        if succeeded:
            usage = read_usage(reply.body)
            progress.prompt_tokens += usage.prompt_tokens or usage.input_tokens
            progress.output_tokens += usage.completion_tokens or usage.output_tokens
        progress.num_succeeded, progress.num_failed = files.num_succeeded, files.num_failed

    async def _sync_files(self) -> None:
        """Limit what a crash of the machine takes to the results of a second."""
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(self._files.sync)
