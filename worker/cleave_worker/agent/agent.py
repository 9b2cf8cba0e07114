"""One worker from start to end: gRPC server, engine supervisor, signals, drain.

Called by main. The order at shutdown matters: DRAINING is announced first, the engine ends only
when it is empty, and the response to the Drain call still gets through.
"""

import asyncio
import logging
import signal
from functools import partial

from cleave_worker.agent import drain as draining
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.drain import DrainResult
from cleave_worker.agent.gang.gang_link import make_member
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.readiness import verify_role
from cleave_worker.agent.service import AgentServer, make_authenticator
from cleave_worker.agent.supervisor import EngineSupervisor

_log = logging.getLogger(__name__)
_RPC_GRACE_SECONDS = 1.0
_GANG_SLACK_SECONDS = 2.0
"""Beyond the drain timeout, for the last data-parallel rank to report that it is drained."""


class WorkerAgent:
    """The parts of one worker process."""

    def __init__(self, config: AgentConfig, cores: tuple[int, ...], gpu: bool) -> None:
        self._config = config
        self._instance = WorkerInstance(config)
        self._gang = make_member(config, self._begin_gang_drain)
        self._supervisor = EngineSupervisor(config, self._instance, cores, gpu, self._gang)
        verify = partial(verify_role, config, self._instance)
        self._server = AgentServer(
            self._instance,
            self._handle_drain_call,
            verify,
            config.address,
            make_authenticator(config, config.name, config.address),
        )
        self._stopping = asyncio.Event()
        self._drain: asyncio.Task[DrainResult] | None = None
        self._has_signal = False

    async def run(self) -> int:
        """Run until drained (returns 0) or a second signal (1). Raises OSError: port taken."""
        await self._server.start()
        if self._gang:
            self._gang.open()
        if not self._config.authenticates_callers:
            address = self._config.address
            _log.warning("callers are not authenticated: %s and its engine serve all", address)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        supervising = asyncio.create_task(self._supervisor.run())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({supervising, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done() and not self._instance.draining:
                supervising.result()
            if self._drain:
                await asyncio.wait({self._drain, stopping}, return_when=asyncio.FIRST_COMPLETED)
            drained = self._drain is not None and self._drain.done()
            _log.info("ends %s", "drained" if drained else "at once")
            return 0 if drained else 1
        finally:
            stopping.cancel()
            await self._end(supervising)

    def _on_signal(self) -> None:
        if not self._has_signal:
            # A call, or a data-parallel rank that got the signal earlier, may have begun the drain.
            self._has_signal = True
            self._begin_drain(self._config.drain_timeout)
        else:
            _log.warning("second signal: ending at once")
            self._supervisor.kill_engine()
            self._stopping.set()

    async def _handle_drain_call(self, seconds: float | None) -> DrainResult:
        limit = self._config.drain_timeout if seconds is None else seconds
        return await asyncio.shield(self._begin_drain(limit))

    def _begin_drain(self, seconds: float) -> asyncio.Task[DrainResult]:
        if self._drain is None:
            _log.info("draining for at most %.0f s", seconds)
            self._instance.drain()
            if self._gang:
                self._gang.report_drain()
            self._drain = asyncio.create_task(self._wait_until_empty(seconds))
            self._drain.add_done_callback(lambda _: self._stopping.set())
        return self._drain

    def _begin_gang_drain(self) -> None:
        self._begin_drain(self._config.drain_timeout)

    async def _wait_until_empty(self, seconds: float) -> DrainResult:
        timing, clock = self._config.timing, asyncio.get_running_loop().time
        ends_at = clock() + max(seconds, self._config.drain_timeout) + _GANG_SLACK_SECONDS
        drained = await draining.drain(
            lambda: self._instance.load, seconds, timing.quiet_period, timing.drain_poll
        )
        if not drained.is_empty:
            _log.warning("drain timed out with %d unfinished requests", drained.num_remaining)
        if self._gang:
            # The other data-parallel ranks need this engine for their own steps.
            await self._gang.finish_drain(ends_at - clock())
        return drained

    async def _end(self, supervising: "asyncio.Task[None]") -> None:
        if self._drain and not self._drain.done():
            self._drain.cancel()
        supervising.cancel()
        await asyncio.wait({supervising})
        if self._gang:
            self._gang.close()
        self._instance.end()
        await self._server.stop(_RPC_GRACE_SECONDS)
