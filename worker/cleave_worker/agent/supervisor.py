"""Keeps an engine running: start, wait until it responds, verify its KV path, watch it, restart.

Run by the agent until it is cancelled. Three things happen at once in each boot of the engine (the
process may end, its health may fail, its KV path is being verified), and however a boot ends, no
process or file of it may remain when the next one starts.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from cleave.perf.model import model_report
from cleave.rpc.engine_key import build_headers, create_key
from cleave.rpc.http_client import HttpError
from cleave.shm.load_page import LoadPage, LoadSnapshot
from cleave_worker.agent import engine_api
from cleave_worker.agent.adapters.adapter_keeper import keep_loaded
from cleave_worker.agent.config import AgentConfig, AgentTiming
from cleave_worker.agent.gang.gang_link import GangMember, StartRefused
from cleave_worker.agent.instance import EnginePages, WorkerInstance, get_kv_direction
from cleave_worker.agent.launch import (
    Boot,
    MeetingPoint,
    build_engine_launch,
    create_boot_id,
    find_free_port,
    read_block_size,
)
from cleave_worker.agent.process import EngineProcess, choose_sink
from cleave_worker.agent.readiness import verify_kv_path
from cleave_worker.agent.weights.loaded_weights import (
    Weights,
    WeightsError,
    find_change,
    read_weights,
)
from cleave_worker.agent.weights.model_link import link_model
from cleave_worker.scheduling.config_page import SchedulingPage

_log = logging.getLogger(__name__)
_KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Of the subreaper, and of the engine below it."""


class EngineFault(RuntimeError):  # noqa: N818
    """Why a boot of the engine ended or must end."""


def choose_prefix_port(config: AgentConfig, boot: Boot) -> int:
    """Return where the engine's prefix cache can be pulled from, if it serves it at all, which
    depends on its connector and its model (docs/decisions/prefix-pulls.md)."""
    return boot.kv_port if config.engine == "emulated" else boot.prefix_port


def compute_restart_delay(quick_deaths: int, timing: AgentTiming) -> float:
    """Return the seconds before the next start, after `quick_deaths` short boots in a row."""
    return min(timing.restart_delay * 2.0 ** min(quick_deaths, 30), timing.restart_delay_max)


def is_stalled(load: LoadSnapshot, now_ns: int, seconds: float) -> bool:
    """Return whether an engine that has requests ran no step for `seconds`."""
    return bool(load.num_running + load.num_waiting) and now_ns - load.sampled_ns > seconds * 1e9


@contextmanager
def open_pages() -> Iterator[tuple[Path, EnginePages]]:
    """Folder and pages of one boot. Raises EngineFault when there is no room for them."""
    with ExitStack() as stack:
        try:
            # The subreaper removes the folder when this process cannot.
            created = TemporaryDirectory(prefix="cleave-agent-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(created))
            load_page = stack.enter_context(LoadPage(folder / "load"))
            scheduling_page = stack.enter_context(SchedulingPage(folder / "terms"))
        except OSError as error:
            where = gettempdir()
            raise EngineFault(
                f"cannot create the files of an engine in {where}: {error}"
            ) from error
        yield folder, EnginePages(load_page, scheduling_page)


class EngineSupervisor:
    """The engine of one agent, through all of its boots."""

    def __init__(
        self,
        config: AgentConfig,
        instance: WorkerInstance,
        cores: tuple[int, ...],
        gpu: bool,
        gang: GangMember | None = None,
    ) -> None:
        """`gang`: the other data-parallel ranks; None: there are none."""
        self._gang = gang
        self._config = config
        self._instance = instance
        self._cores = cores
        self._gpu = gpu
        self._process: EngineProcess | None = None
        self._kill_at_once = False

    def kill_engine(self) -> None:
        """Kill the present engine and later ones instead of stopping them gracefully."""
        self._kill_at_once = True
        if self._process:
            self._process.kill()

    async def run(self) -> None:
        """Keep an engine running until cancelled, or until it ends while draining. Raises GangLost
        when the other data-parallel ranks have ended for good."""
        clock = asyncio.get_running_loop().time
        timing = self._config.timing
        quick_deaths = 0
        while True:
            started_at = clock()
            try:
                weights = await self._read_weights()
                meeting_point = await self._wait_for_gang(weights)
                started_at = clock()
                await self._run_engine(weights, meeting_point)
            except EngineFault as fault:
                if self._gang:
                    self._gang.report_lost()
                _log.warning("engine lost: %s", fault)
                self._instance.mark_engine_lost(str(fault))
            if self._instance.draining:
                return
            quick_deaths = 0 if clock() - started_at >= timing.stable_after else quick_deaths + 1
            await asyncio.sleep(compute_restart_delay(max(0, quick_deaths - 1), timing))

    async def _read_weights(self) -> Weights:
        """Find out what the engine is about to load. Raises EngineFault."""

        def report(share: float) -> None:
            self._instance.report_start_stage(f"reads what it will load, {share:.0%}")

        try:
            return await read_weights(self._config, os.environ, report)
        except WeightsError as error:
            raise EngineFault(f"{self._config.model}: {error}") from error

    async def _wait_for_gang(self, weights: Weights) -> MeetingPoint | None:
        """Wait until the engines of all ranks may start. Raises EngineFault, GangLost."""
        if self._gang is None:
            return None
        try:
            return await self._gang.wait_for_start(weights.id)
        except StartRefused as error:
            raise EngineFault(str(error)) from error

    async def _run_engine(self, weights: Weights, meeting_point: MeetingPoint | None) -> None:
        """Run one engine from start to end. Raises EngineFault."""
        with open_pages() as (folder, pages):
            boot = self._create_boot(folder, weights, meeting_point)
            url = _build_url(self._config.host, boot.engine_port)
            process = self._process = await EngineProcess.start(
                build_engine_launch(self._config, boot, os.environ),
                cores=boot.cores,
                scratch=boot.load_page.parent,
                stop_grace=self._config.timing.stop_grace,
                sink=choose_sink(self._config.log_format),
            )
            try:
                kv_port = boot.kv_port if self._config.is_overlapped else 0
                self._instance.start_boot(
                    boot.boot_id, url, pages, kv_port, boot.engine_key, boot.weights
                )
                _log.info("engine %s starts at %s", boot.boot_id, url)
                supervision = self._supervise(url, boot)
                of_gang = [_raise_at_stop(self._gang)] if self._gang else []
                await _run_until_first_ends(supervision, _raise_at_exit(process), *of_gang)
            except EngineFault:
                # An engine that does not respond will not stop gracefully either, and delays the
                # next start.
                process.kill()
                raise
            finally:
                self._instance.detach_pages()
                if self._kill_at_once:
                    process.kill()
                await process.stop()

    def _create_boot(
        self, folder: Path, weights: Weights, meeting_point: MeetingPoint | None
    ) -> Boot:
        host = self._config.host
        return Boot(
            boot_id=create_boot_id(self._config),
            engine_port=self._config.engine_port or find_free_port(host),
            kv_port=find_free_port(host),
            prefix_port=find_free_port(host),
            load_page=folder / "load",
            scheduling_page=folder / "terms" if self._config.scheduling else None,
            cores=self._cores,
            gpu=self._gpu,
            engine_key=create_key() if self._config.authenticates_callers else "",
            meeting_point=meeting_point,
            weights=weights,
            model=link_model(self._config, weights),
        )

    async def _supervise(self, url: str, boot: Boot) -> None:
        await self._wait_until_healthy(url)
        await self._check_weights(boot.weights)
        if self._config.engine == "vllm":
            # Before peers learn that it responds and test with it.
            await self._warm_up(url, boot.engine_key)
        prefix_port = choose_prefix_port(self._config, boot)
        timeout_s = self._config.timing.health_timeout
        if await engine_api.is_listening(self._config.host, prefix_port, timeout_s):
            self._instance.set_prefix_port(prefix_port)
        await self._wait_for_engine_info(url, boot)
        verification = keep_verified(self._config, self._instance)
        adapters = keep_loaded(self._config, self._instance, url, build_headers(boot.engine_key))
        await _run_until_first_ends(verification, adapters, self._watch_health(url))

    async def _wait_until_healthy(self, url: str) -> None:
        timing = self._config.timing
        try:
            async with asyncio.timeout(timing.start_timeout):
                while True:
                    if not await engine_api.check_health(url, timing.health_timeout):
                        return
                    if self._process is not None:
                        self._instance.report_start_stage(self._process.start_stage)
                    await asyncio.sleep(timing.start_poll)
        except TimeoutError:
            raise EngineFault(f"did not answer within {timing.start_timeout:g} s") from None

    async def _check_weights(self, weights: Weights) -> None:
        """Check that the engine has loaded what was read before. Raises EngineFault."""
        try:
            change = await find_change(self._config, os.environ, weights)
        except WeightsError as error:
            change = f"{self._config.model}: {error}"
        if change:
            raise EngineFault(change)

    async def _wait_for_engine_info(self, url: str, boot: Boot) -> None:
        config, seconds = self._config, self._config.timing.health_timeout
        block_size = read_block_size(config, self._gpu)
        try:
            info = await engine_api.fetch_info(
                *(url, config.engine, block_size, seconds, build_headers(boot.engine_key)),
                model_report=model_report.read(boot.load_page),
            )
        except HttpError as error:
            raise EngineFault(f"does not say what it serves: {error}") from error
        self._instance.set_engine_info(info)

    async def _warm_up(self, url: str, engine_key: str) -> None:
        config = self._config
        try:
            fault = await engine_api.warm_up(
                *(url, config.served_model_name, config.timing.start_timeout),
                build_headers(engine_key),
            )
        except HttpError as error:
            raise EngineFault(f"does not answer its first request: {error}") from error
        if fault:
            _log.warning("the first request, which only warms the engine up, failed: %s", fault)

    async def _watch_health(self, url: str) -> None:
        timing = self._config.timing
        failures = 0
        while True:
            await asyncio.sleep(timing.health_retry if failures else timing.health_interval)
            fault = await engine_api.check_health(url, timing.health_timeout)
            failures = failures + 1 if fault else 0
            if failures >= timing.health_failures:
                fault = f"{fault}, {failures} times in a row"
                # An API server whose engine core has ended takes seconds to end, too.
                cause = self._process.fault if self._process is not None else ""
                raise EngineFault(f"{cause} ({fault})" if cause else fault)
            if is_stalled(self._instance.load, time.monotonic_ns(), timing.stall_timeout):
                raise EngineFault(f"has requests and made no step for {timing.stall_timeout:g} s")


async def keep_verified(config: AgentConfig, instance: WorkerInstance) -> None:
    """Verify the KV path, and again when a new role needs it; ended by the health checks."""
    while True:
        await verify_kv_path(config, instance)
        while not config.peers or instance.is_verified(
            get_kv_direction(instance.copy_registration().role)
        ):
            await instance.wait_for_change()


async def _raise_at_exit(process: EngineProcess) -> None:
    status, reason = await process.wait(), process.exit_reason
    if status in _KILLED_STATUSES:
        # Its last line in the log is of before, as a killed process writes no cause.
        reason = "killed (SIGKILL), often because memory ran out"
    raise EngineFault(f"engine ended with status {status}" + (f": {reason}" if reason else ""))


async def _raise_at_stop(gang: GangMember) -> None:
    await gang.wait_for_stop()
    raise EngineFault("the engine of another data-parallel rank was lost")


async def _run_until_first_ends(*coroutines: Coroutine[object, object, None]) -> None:
    """Run all until one ends; raise its error and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _build_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
