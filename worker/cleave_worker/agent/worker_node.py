"""Runs the ranks of an engine on a node other than its agent's.

The container command of the further pods of a multi-node instance. The ranks of all nodes live and
die together. A worker node starts its ranks when the leader's agent has started an engine, with
that engine's boot id. It ends them when the leader has started another engine or is lost. When it
must stop, it requests a drain of the leader first.

Exit codes: 0 the leader is drained; 2 bad usage; 1 the ranks ended by themselves, or other errors.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from cleave import logs
from cleave.options import add_options, read_options
from cleave.rpc.agent_discovery import DiscoveryError, find_agent
from cleave.rpc.channel import dial
from cleave.rpc.credentials import AgentEndpoint, find_credentials
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent import launch, subreaper
from cleave_worker.agent.config import AgentConfig, separate_engine_args
from cleave_worker.agent.launch import Boot, Launch, LaunchError
from cleave_worker.agent.peers import fetch_registration
from cleave_worker.agent.process import EngineProcess, choose_sink
from cleave_worker.agent.weights.loaded_weights import Weights, WeightsError, read_weights
from cleave_worker.agent.weights.model_link import link_model

_log = logging.getLogger(__name__)

_DRAIN_SLACK_S = 5.0
"""Time for the leader to respond, beyond its drain."""


_ENGINE_FIELDS = {
    *("peers", "host", "model", "served_model_name", "tensor_parallel_size"),
    *("pipeline_parallel_size", "expert_parallel", "max_model_len", "connector", "transfer"),
    "drain_timeout",
}
"""What a worker node has to know of its engine."""


@dataclass(frozen=True, slots=True)
class LeaderTiming:
    """Periods and time limits, in seconds."""

    poll_interval: float = 1.0
    """Interval between requests to the leader."""
    leader_timeout: float = 15.0
    """Time without a response after which the leader counts as lost."""


@dataclass(frozen=True, slots=True)
class WorkerNodeConfig:
    """The command line of one worker node."""

    leader: str
    """host:port of the leader's agent; the host begins with the name of its pod."""
    engine: AgentConfig
    """Model, parallelism and the engine's own arguments."""
    timing: LeaderTiming = LeaderTiming()


class WorkerNode:
    """The ranks of one node, through all boots of the leader's engine."""

    def __init__(self, config: WorkerNodeConfig, gpu: bool) -> None:
        self._config = config
        self._gpu = gpu
        self._credentials = find_credentials()
        self._leader: AgentEndpoint | None = None
        """As it was found last."""
        self._stop_requested = asyncio.Event()

    def stop(self) -> None:
        """Drain the leader, then end."""
        self._stop_requested.set()

    async def run(self) -> int:
        """Run until stopped (returns 0) or until the ranks end (1). Raises LaunchError."""
        engines = asyncio.create_task(self._run_engines())
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({engines, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if engines.done():
                return engines.result()
            await self._drain_leader()
            return 0
        finally:
            for task in (engines, stopping):
                task.cancel()
            await asyncio.wait({engines, stopping})

    async def _run_engines(self) -> int:
        while True:
            leader = await self._fetch_leader()
            if leader and leader.boot_id:
                try:
                    weights = await self._read_weights(leader)
                except WeightsError as error:
                    _log.error("the ranks of engine %s do not start: %s", leader.boot_id, error)
                    return 1
                if not await self._run_engine(leader, weights):
                    return 1
            await asyncio.sleep(self._config.timing.poll_interval)

    async def _read_weights(self, leader: agent_pb2.Registration) -> Weights:
        """Read what the ranks of this node load. Raises WeightsError if the leader's load something
        else."""
        weights = await read_weights(self._config.engine, os.environ, lambda _: None)
        if weights.id != leader.weights:
            raise WeightsError(
                f"this node has weights {weights.id}, that of {leader.instance} {leader.weights}: "
                "give all nodes of an instance the same files"
            )
        return weights

    async def _run_engine(self, leader: agent_pb2.Registration, weights: Weights) -> bool:
        """Run the ranks of one boot; return whether they ended because the boot did."""
        config, boot_id = self._config, leader.boot_id
        with TemporaryDirectory(prefix="cleave-share-", ignore_cleanup_errors=True) as folder:
            process = await EngineProcess.start(
                build_launch(config, leader, weights, Path(folder), self._gpu, os.environ),
                cores=(),
                scratch=Path(folder),
                stop_grace=config.engine.timing.stop_grace,
                sink=choose_sink(config.engine.log_format),
            )
            _log.info("ranks of engine %s start", boot_id)
            ended = asyncio.create_task(process.wait())
            over = asyncio.create_task(self._wait_until_boot_ends(boot_id))
            try:
                await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    over.result()
                    return True
                _log.error("ranks of engine %s ended: %s", boot_id, process.exit_reason)
                return False
            finally:
                for task in (ended, over):
                    task.cancel()
                await asyncio.gather(ended, over, return_exceptions=True)
                await process.stop()

    async def _wait_until_boot_ends(self, boot_id: str) -> None:
        """Return when the leader has another engine, or has not responded for `lost` seconds."""
        clock, timing = asyncio.get_running_loop().time, self._config.timing
        answered_at = clock()
        while clock() - answered_at < timing.leader_timeout:
            await asyncio.sleep(timing.poll_interval)
            current = await self._fetch_boot_id()
            if current == boot_id:
                answered_at = clock()
            elif current:
                _log.info("the leader has started engine %s", current)
                return
        _log.warning("the leader has not answered for %g s", timing.leader_timeout)

    async def _fetch_boot_id(self) -> str:
        """Return the boot id of the leader's engine; empty without a response or an engine."""
        registration = await self._fetch_leader()
        return registration.boot_id if registration else ""

    async def _fetch_leader(self) -> agent_pb2.Registration | None:
        leader = await self._find_leader()
        registration = await fetch_registration(leader, self._credentials) if leader else None
        if registration is None:
            # Its pod may have been replaced.
            self._leader = None
        return registration

    async def _find_leader(self) -> AgentEndpoint | None:
        """The leader's agent; None: its pod is not listed."""
        if self._leader is None:
            with contextlib.suppress(OSError, TimeoutError):
                self._leader = await find_agent(self._config.engine.peers, self._config.leader)
        return self._leader

    async def _drain_leader(self) -> None:
        timeout_s = self._config.engine.drain_timeout + _DRAIN_SLACK_S
        leader = await self._find_leader()
        if leader is None:
            return
        metadata = await self._credentials.build_metadata(leader)
        async with dial(leader.address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                stub = agent_pb2_grpc.AgentStub(channel)
                request = agent_pb2.DrainRequest()
                await stub.Drain(request, timeout=timeout_s, metadata=metadata)


def build_launch(
    config: WorkerNodeConfig,
    leader: agent_pb2.Registration,
    weights: Weights,
    folder: Path,
    gpu: bool,
    env: Mapping[str, str],
) -> Launch:
    """Build the process of the ranks of this node. Raises LaunchError."""
    boot = Boot(
        leader.boot_id,
        engine_port=0,
        kv_port=launch.find_free_port(config.engine.host),
        load_page=folder / "load",
        gpu=gpu,
        engine_key=leader.engine_key,
        weights=weights,
        model=link_model(config.engine, weights),
    )
    return launch.build_headless_launch(config.engine, boot, env)


def parse(argv: Sequence[str]) -> WorkerNodeConfig:
    """Parse the command line. Bad usage ends the process with exit code 2, as argparse does."""
    own, engine_args = separate_engine_args(argv)
    parser = _build_parser()
    options = parser.parse_args(own)
    if not options.host:
        parser.error("--host is required (or POD_IP)")
    engine = read_options(
        AgentConfig,
        options,
        name=options.leader,
        deployment="",
        role=agent_pb2.ROLE_UNSPECIFIED,
        served_model_name=options.served_model_name or options.model,
        log_format=options.log_format,
        engine_args=engine_args,
    )
    return WorkerNodeConfig(options.leader, engine)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the exit code."""
    config = parse(sys.argv[1:] if argv is None else argv)
    named = logs.TextFormatter("%(asctime)s %(levelname)s %(message)s")
    logs.configure(config.engine.log_format, text=named, always={"instance": config.engine.name})
    subreaper.become_subreaper()
    try:
        return asyncio.run(_run(config))
    except (LaunchError, DiscoveryError) as error:
        print(f"cleave-worker-node: {error}", file=sys.stderr)  # noqa: T201
        return 2


async def _run(config: WorkerNodeConfig) -> int:
    follower = WorkerNode(config, launch.has_gpu())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, follower.stop)
    return await follower.run()


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cleave-worker-node",
        description="Runs the ranks of a multi-node engine on this node.",
        epilog="Arguments after -- go to the engine, including the rank of this node.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--leader", required=True, metavar="HOST:PORT", help="agent of the instance"
    )
    add_options(parser, AgentConfig, only=_ENGINE_FIELDS)
    logs.add_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
