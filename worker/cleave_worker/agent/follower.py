"""The share of an engine that runs on another node than its agent.

The container command of the further pods of an instance that is spread over nodes. What is hard:
all shares live and die together. A share starts when the leader's agent has started an engine and
takes that engine's boot id; it ends when the leader has another one or is gone; and when it is told
to end, it has the leader drained first.

Exit codes: 0 the leader is drained; 2 bad usage; 1 the share ended by itself, or anything else.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from cleave.metrics import logs
from cleave.rpc.channel import dial
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent import warden
from cleave_worker.agent.config import CONNECTORS, TRANSFERS, AgentConfig
from cleave_worker.agent.launch import Boot, Launch, LaunchError, free_port, has_gpu, share
from cleave_worker.agent.peers import ask
from cleave_worker.agent.process import EngineProcess, find_sink

_log = logging.getLogger(__name__)

_SLACK_S = 5.0
"""For the leader to answer, beyond its drain."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Periods and bounds, in seconds."""

    poll: float = 1.0
    """Between two questions to the leader."""
    lost: float = 15.0
    """Without an answer for so long, the leader is gone."""


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """What one follower was told."""

    leader: str
    """host:port of the leader's agent."""
    engine: AgentConfig
    """Model, sizes and the engine's own arguments."""
    patience: Patience = Patience()


class Follower:
    """One share, over all lives of the leader's engine."""

    def __init__(self, config: FollowerConfig, gpu: bool) -> None:
        self._config = config
        self._gpu = gpu
        self._told = asyncio.Event()

    def stop(self) -> None:
        """Have the leader drained, then end."""
        self._told.set()

    async def run(self) -> int:
        """Follow until told to end (0) or until a share ends by itself (1). Raises LaunchError."""
        following = asyncio.create_task(self._follow())
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait({following, told}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return following.result()
            await self._drain_leader()
            return 0
        finally:
            for task in (following, told):
                task.cancel()
            await asyncio.wait({following, told})

    async def _follow(self) -> int:
        while True:
            boot_id = await self._boot_id()
            if boot_id and not await self._life(boot_id):
                return 1
            await asyncio.sleep(self._config.patience.poll)

    async def _life(self, boot_id: str) -> bool:
        """One share, from start to end; whether it ended because its boot was over."""
        config = self._config
        with tempfile.TemporaryDirectory(
            prefix="cleave-share-", ignore_cleanup_errors=True
        ) as folder:
            process = await EngineProcess.start(
                launched(config, boot_id, Path(folder), self._gpu, os.environ),
                agent_pid=os.getpid(),
                cores=(),
                scratch=Path(folder),
                stop_grace=config.engine.timing.stop_grace,
                sink=find_sink(config.engine.log_format),
            )
            _log.info("share of engine %s starts", boot_id)
            ended = asyncio.create_task(process.wait())
            over = asyncio.create_task(self._until_over(boot_id))
            try:
                await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    over.result()
                    return True
                _log.error("share of engine %s ended: %s", boot_id, process.last_words)
                return False
            finally:
                for task in (ended, over):
                    task.cancel()
                await asyncio.gather(ended, over, return_exceptions=True)
                await process.stop()

    async def _until_over(self, boot_id: str) -> None:
        """Return when the leader has another engine, or has not answered for long."""
        clock, patience = asyncio.get_running_loop().time, self._config.patience
        seen = clock()
        while clock() - seen < patience.lost:
            await asyncio.sleep(patience.poll)
            now = await self._boot_id()
            if now == boot_id:
                seen = clock()
            elif now:
                _log.info("the leader starts engine %s", now)
                return
        _log.warning("the leader has not answered for %g s", patience.lost)

    async def _boot_id(self) -> str:
        """Of the leader's engine; empty: it does not answer, or has none yet."""
        registration = await ask(self._config.leader)
        return registration.boot_id if registration else ""

    async def _drain_leader(self) -> None:
        limit = self._config.engine.drain_timeout
        async with dial(self._config.leader) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await agent_pb2_grpc.AgentStub(channel).Drain(
                    agent_pb2.DrainRequest(), timeout=limit + _SLACK_S
                )


def launched(
    config: FollowerConfig, boot_id: str, folder: Path, gpu: bool, env: Mapping[str, str]
) -> Launch:
    """The process of a share. Raises LaunchError."""
    host = config.engine.host
    boot = Boot(boot_id, engine_port=0, kv_port=free_port(host), load_page=folder / "load", gpu=gpu)
    return share(config.engine, boot, env)


def parse(argv: Sequence[str]) -> FollowerConfig:
    """Command line to config. Bad usage ends the process with exit code 2, as argparse does."""
    arguments = [*argv]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    return FollowerConfig(
        leader=options.leader,
        engine=AgentConfig(
            name=options.leader,
            deployment="",
            revision="",
            role=agent_pb2.ROLE_UNSPECIFIED,
            model=options.model,
            served_model_name=options.served_model_name or options.model,
            engine="vllm",
            host=options.host,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            max_model_len=options.max_model_len,
            connector=options.connector,
            transfer=options.transfer,
            drain_timeout=options.drain_timeout,
            log_format=options.log_format,
            engine_args=tuple(arguments[cut + 1 :]),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end; returns the exit code."""
    config = parse(sys.argv[1:] if argv is None else argv)
    named = logs.TextLines("%(asctime)s %(levelname)s %(message)s")
    logs.set_up(config.engine.log_format, text=named, always={"instance": config.engine.name})
    warden.become_subreaper()
    try:
        return asyncio.run(_run(config))
    except LaunchError as error:
        print(f"cleave-follower: {error}", file=sys.stderr)  # noqa: T201
        return 2


async def _run(config: FollowerConfig) -> int:
    follower = Follower(config, has_gpu())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, follower.stop)
    return await follower.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cleave-follower",
        description="Runs the share of an engine that is spread over nodes.",
        epilog="Arguments after -- go to the engine, its rank among them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--leader", required=True, metavar="HOST:PORT", help="agent of the instance")
    add("--host", required=True, help="this pod's own address")
    add("--model", required=True, metavar="FOLDER_OR_ID")
    add("--served-model-name", metavar="NAME")
    add("--tensor-parallel-size", type=int, default=1)
    add("--pipeline-parallel-size", type=int, default=1)
    add("--max-model-len", type=int, default=0, metavar="TOKENS")
    add("--connector", choices=CONNECTORS, default="nixl")
    add("--transfer", choices=TRANSFERS, default=TRANSFERS[0])
    add("--drain-timeout", type=float, default=600.0, metavar="SECONDS")
    logs.add_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
