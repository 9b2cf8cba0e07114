"""The engine loop: runs the scheduler's steps in emulated time and sends tokens to listeners.

The API submits and aborts requests; the loop computes one step after another and sleeps while there
is nothing to do (no polling). An iteration must end when the latency model says, so ends are
absolute deadlines and inexact sleeps do not add up.
"""

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cleave.shm.load_page import LoadPage, LoadSnapshot
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.config import EmulatedEngineConfig
from cleave_worker.emulator.faults import Faults, PairFault
from cleave_worker.emulator.host_memory import HostMemory
from cleave_worker.emulator.metrics import EngineMetrics
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineStep, SampledToken
from cleave_worker.emulator.sequence import EngineRequest, FinishReason, Sequence, SequenceState
from cleave_worker.emulator.side_channel import KvSideChannel, KvTransferError
from cleave_worker.scheduling.config_page import SchedulingPage

_log = logging.getLogger(__name__)

_SLOW_FACTOR = 20
_MAX_LAG_S = 0.1
"""Longest delay of the loop that it catches up on."""


class TokenListener(Protocol):
    """Receives a sequence's tokens. Called from the loop, so it must not block."""

    def push(self, token: int, finish: FinishReason | None) -> None:
        """Receive one token; the last one comes with the finish reason."""

    def fail(self, reason: str) -> None:
        """End without the remaining tokens."""


class EmulatedEngine:
    """One emulated instance."""

    def __init__(
        self,
        config: EmulatedEngineConfig,
        load_page: Path | None = None,
        scheduling_page: Path | None = None,
    ) -> None:
        self.config = config
        self.faults = Faults()
        self.metrics = EngineMetrics()
        self._last_contents: list[int] = []
        """Blocks that were pulled last."""
        pool = BlockPool(config.num_blocks, config.block_size)
        host = HostMemory(config.host_blocks) if config.host_blocks else None
        self.scheduler = EmulatedScheduler(config.limits, pool, host=host)
        self._host_free_at = 0.0
        """When the next prompt can be copied back from host memory, by time.monotonic."""
        self.side_channel: KvSideChannel | None = None
        if config.kv_transfer:
            self.side_channel = KvSideChannel(
                config.kv_transfer, self.scheduler, self.faults, self.metrics, self._on_freed
            )
        self._load_page = LoadPage(load_page) if load_page else None
        self._moved_ns = 0
        """When its loop last could run steps, by CLOCK_MONOTONIC."""
        self._scheduling_page = SchedulingPage(scheduling_page) if scheduling_page else None
        self._listeners: dict[Sequence, TokenListener] = {}
        self._pulls: dict[Sequence, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs (an engine that hangs counts as alive, as with vLLM)."""
        return self._loop_task is not None and not self._loop_task.done()

    @property
    def num_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._listeners)

    async def start(self) -> None:
        """Open the KV side channel and start the loop. Raises OSError when its port is taken."""
        if self.side_channel:
            await self.side_channel.start()
        self._loop_task = asyncio.create_task(self._run())
        self._loop_task.add_done_callback(self._fail_all)
        self._publish()

    async def stop(self) -> None:
        """End the loop and all pulls."""
        tasks = [*self._pulls.values(), *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.side_channel:
            await self.side_channel.stop()
        if self._load_page:
            self._load_page.close()
        if self._scheduling_page:
            self._scheduling_page.close()

    def submit(self, request: EngineRequest, listener: TokenListener) -> Sequence:
        """Queue a request that fits max_model_len; its tokens go to the listener. An engine without
        a KV connector computes everything itself, as vLLM does."""
        if not self.side_channel:
            request = replace(request, do_remote_decode=False, handoff=None, source=None)
        if self.config.weights:
            request = replace(request, weights=self.config.weights)
        sequence = Sequence(request, time.monotonic())
        self._listeners[sequence] = listener
        self.scheduler.add(sequence)
        if self.side_channel and sequence.handoff:
            self.side_channel.expect(sequence, sequence.handoff)
        self._wake.set()
        self._publish()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Abort a request: free its blocks here and at the prefill instance."""
        if sequence.state is SequenceState.FINISHED:
            return
        handoff = sequence.handoff
        self._drop(sequence, FinishReason.ABORT)
        if self.side_channel and handoff:
            self.side_channel.decline(handoff)

    @property
    def cache_config(self) -> dict[str, str]:
        """Emulated labels of vLLM's `cache_config_info`."""
        return {
            "block_size": str(self.config.block_size),
            "enable_prefix_caching": str(self.config.limits.prefix_caching),
            "num_gpu_blocks": str(self.config.num_blocks),
        }

    def collect_gauges(self) -> dict[str, float]:
        """Return the present state under vLLM's metric names."""
        load = self._build_load()
        return {
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
            "kv_cache_usage_perc": load.kv_cache_usage,
        }

    async def _run(self) -> None:
        deadline = time.monotonic()
        while True:
            if self._scheduling_page and (config := self._scheduling_page.read_if_changed()):
                self.scheduler.apply_scheduling(config)
            step = self.scheduler.schedule()
            for sequence in step.loads:
                self._pulls[sequence] = asyncio.create_task(self._load(sequence))
            self._publish()
            now = time.monotonic()
            if not step.scheduled:
                self._wake.clear()
                await self._wake.wait()
                deadline = time.monotonic()
                continue
            self._record_start(step, now)
            deadline = max(deadline, now - _MAX_LAG_S) + self._compute_duration_s(step)
            await asyncio.sleep(max(0.0, deadline - now))
            await self.faults.wait_until_resumed()
            self._deliver(step)

    def _compute_duration_s(self, step: EngineStep) -> float:
        model_ms = self.config.profile.timing.predict_iteration_ms(
            step.chunks, step.num_decode_tokens, step.context_tokens
        )
        return model_ms * self.config.time_scale * self.faults.slow / 1000

    def _deliver(self, step: EngineStep) -> None:
        now = time.monotonic()
        self.metrics.iteration_tokens.observe(step.num_tokens)
        self.metrics.num_preemptions = self.scheduler.num_preemptions
        # Without a prefix cache vLLM's metric counts nothing; load reports count all prompts.
        if self.scheduler.limits.prefix_caching:
            self.metrics.prefix_queries = self.scheduler.prefix_queries
        self.metrics.prefix_hits = self.scheduler.prefix_hits
        outputs = self.scheduler.complete(step)
        self.metrics.generation_tokens += len(outputs)
        self._publish()
        for output in outputs:
            self._count_output(output, now)
            sequence, token, finish = output
            listener = self._listeners[sequence]
            if finish:
                del self._listeners[sequence]
                if self.side_channel and sequence.request.do_remote_decode:
                    self.side_channel.grant_lease(sequence)
            listener.push(token, finish)

    def _count_output(self, output: SampledToken, now: float) -> None:
        sequence, metrics = output.sequence, self.metrics
        if sequence.first_token_at:
            metrics.itl_s.observe(now - sequence.last_token_at)
        else:
            sequence.first_token_at = now
            self._count_prompt(sequence, now)
        sequence.last_token_at = now
        if output.finish:
            metrics.finished[output.finish.value] += 1
            metrics.e2e_s.observe(now - sequence.submitted_at)
            metrics.decode_s.observe(now - sequence.first_token_at)
            if sequence.num_outputs > 1:
                metrics.tpot_s.observe((now - sequence.first_token_at) / (sequence.num_outputs - 1))

    def _count_prompt(self, sequence: Sequence, now: float) -> None:
        metrics, sources = self.metrics, self.metrics.prompt_tokens_by_source
        metrics.prompt_tokens += sequence.prompt_len
        pulled, cached = sequence.pulled_tokens, sequence.cached_tokens
        sources["external_kv_transfer"] += pulled
        sources["local_cache_hit"] += cached
        sources["local_compute"] += sequence.prompt_len - pulled - cached
        metrics.ttft_s.observe(now - sequence.submitted_at)
        metrics.prefill_s.observe(now - sequence.scheduled_at)

    def _record_start(self, step: EngineStep, now: float) -> None:
        for sequence, _ in step.scheduled:
            if not sequence.scheduled_at:
                sequence.scheduled_at = now
                self.metrics.queue_s.observe(now - sequence.submitted_at)

    async def _load(self, sequence: Sequence) -> None:
        if sequence.handoff:
            await self._pull(sequence)
        elif sequence.source:
            await self._pull_prefix(sequence)
        else:
            await self._copy_back(sequence)

    async def _copy_back(self, sequence: Sequence) -> None:
        """Copy the beginning of a prompt back from host memory, one prompt after another."""
        host, contents = self.scheduler.host, sequence.on_host
        assert host
        tokens, now = len(contents) * self.config.block_size, time.monotonic()
        ms = tokens * self.config.host_token_ms
        self._host_free_at = max(self._host_free_at, now) + ms / 1000
        try:
            await asyncio.sleep(self._host_free_at - now)
        finally:
            self._pulls.pop(sequence, None)
            self._wake.set()
        host.num_hits += tokens
        host.load_ms += ms
        self.scheduler.load_prefix(sequence, contents)

    async def _pull(self, sequence: Sequence) -> None:
        side_channel, handoff = self.side_channel, sequence.handoff
        assert side_channel
        assert handoff
        num_blocks = len(sequence.blocks) - sequence.cached_tokens // self.config.block_size
        started = time.monotonic()
        self.metrics.external_queries += sequence.prompt_len
        try:
            fault = self.faults.pairs.get(handoff.engine_id)
            if self.faults.consume("empty_handoff") or fault is PairFault.EMPTY:
                side_channel.decline(handoff)
                self.scheduler.recompute(sequence)
                return
            if fault is PairFault.HUNG:
                await asyncio.Event().wait()
            duration_s, num_bytes = self._estimate_transfer(num_blocks)
            if fault is PairFault.SLOW:
                duration_s *= _SLOW_FACTOR
            prompt_digest = sequence.request.prompt_digest
            contents = await side_channel.pull(handoff, prompt_digest, num_blocks, duration_s)
            if fault is PairFault.LOST:
                raise KvTransferError("the KV was lost on its way")
            self.metrics.transfer_s.observe(time.monotonic() - started)
            self.metrics.transfer_bytes.observe(num_bytes)
            self.metrics.external_hits += sequence.prompt_len
            previous, self._last_contents = self._last_contents, contents
            self.scheduler.load(sequence, _change_contents(contents, previous, fault))
        except KvTransferError as error:
            self.metrics.failed_transfers += 1
            self._handle_failed_load(sequence, str(error))
        finally:
            self._pulls.pop(sequence, None)
            side_channel.forget(sequence)
            self._wake.set()

    async def _pull_prefix(self, sequence: Sequence) -> None:
        """Pull the beginning of a prompt from another engine's cache; what cannot be pulled is
        computed."""
        side_channel, source = self.side_channel, sequence.source
        assert side_channel
        assert source
        keys = self.scheduler.get_missing_keys(sequence)
        started = time.monotonic()
        self.metrics.external_queries += len(keys) * self.config.block_size
        contents: list[int] = []
        try:
            contents = await side_channel.pull_prefix(
                source, keys, lambda blocks: self._estimate_transfer(blocks)[0]
            )
            if contents:
                self.metrics.transfer_s.observe(time.monotonic() - started)
                self.metrics.transfer_bytes.observe(self._estimate_transfer(len(contents))[1])
                self.metrics.external_hits += len(contents) * self.config.block_size
        except KvTransferError:
            self.metrics.failed_transfers += 1
        finally:
            self._pulls.pop(sequence, None)
            self._wake.set()
        self.scheduler.load_prefix(sequence, contents)

    def _estimate_transfer(self, num_blocks: int) -> tuple[float, int]:
        """Return seconds and bytes of the transfer of `num_blocks` blocks."""
        kv = self.config.kv_transfer
        assert kv
        num_bytes = num_blocks * self.config.block_size * self.config.shape.kv_bytes_per_token
        seconds = kv.latency_ms / 1000 + num_bytes * 8 / (kv.bandwidth_gbps * 1e9)
        return seconds * self.config.time_scale, num_bytes

    def _handle_failed_load(self, sequence: Sequence, reason: str) -> None:
        """Apply kv_load_failure_policy to a sequence whose pull failed."""
        kv = self.config.kv_transfer
        if kv and kv.recompute_on_failure:
            self.scheduler.recompute(sequence)
            return
        listener = self._listeners[sequence]
        self._drop(sequence, FinishReason.ERROR)
        listener.fail(f"KV load failed: {reason}")

    def _drop(self, sequence: Sequence, finish: FinishReason) -> None:
        self.scheduler.abort(sequence)
        self.metrics.finished[finish.value] += 1
        self._listeners.pop(sequence, None)
        pull = self._pulls.pop(sequence, None)
        if pull and pull is not asyncio.current_task():
            pull.cancel()
        if self.side_channel:
            self.side_channel.forget(sequence)
        self._on_freed()

    def _fail_all(self, loop_task: asyncio.Task[None]) -> None:
        """End all requests with an error after the loop has died, which /health reports."""
        if loop_task.cancelled():
            return
        _log.error("the engine loop died", exc_info=loop_task.exception())
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.fail("the engine is dead")

    def _on_freed(self) -> None:
        self._wake.set()
        self._publish()

    def _build_load(self) -> LoadSnapshot:
        scheduler, pool, host = self.scheduler, self.scheduler.pool, self.scheduler.host
        return LoadSnapshot(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            pending_prompt_tokens=scheduler.pending_prompt_tokens,
            kv_blocks_free=pool.num_free,
            kv_blocks_total=pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            kv_cache_usage=1 - pool.num_free / pool.num_blocks,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            host_kv_hits=host.num_hits if host else 0,
            host_kv_load_ms=host.load_ms if host else 0.0,
            sampled_ns=self._moved_ns,
        )

    def _publish(self) -> None:
        # Requests that come to an engine that hangs are no sign of life.
        if not (self._moved_ns and self.faults.hang):
            self._moved_ns = time.monotonic_ns()
        if self._load_page:
            self._load_page.write_oldest_kv(self.scheduler.pool.uses.oldest_ns)
            self._load_page.write(self._build_load())


def _change_contents(
    contents: list[int], previous: list[int], fault: PairFault | None
) -> list[int]:
    """Return the blocks of a handoff as a fault of its pair leaves them; `previous`: those of the
    handoff before."""
    if fault is PairFault.LAYOUT:
        return contents[1:] + contents[:1]
    if fault is PairFault.STALE and previous:
        return previous[:1] + contents[1:]
    if fault is PairFault.SWAPPED and previous:
        repeated = previous * (len(contents) // len(previous) + 1)
        return repeated[: len(contents)]
    return contents
