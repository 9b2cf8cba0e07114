"""Runs several agents in one container: of a cell, or of the data-parallel ranks of an instance.

The container command of a pool with `members`, or with a data-parallel size above 1. Engines of one
container share its PID namespace and device files, so their KV and what ranks exchange takes CUDA
IPC, over NVLink where there is one. Each agent is a process of its own, as it kills what descends
from it, and sees only its own GPUs and cores. The agents start, drain and end together: when one
ends by itself, the others end at once, and the container is restarted. The engines of a cell are
restarted one by one, those of data-parallel ranks all at once (`agent.gang`), also where an
instance has several pods: the launcher of the first one keeps the ranks of all.

The standard health protocol reports for probes: alive while every agent responds, and ready while
every instance is.

Exit codes: 0 all are drained; 2 bad usage, of the cell or as the agent that ended first reports it;
1 an agent ended by itself otherwise or failed while it drained, or other errors.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave import logs
from cleave.rpc.channel import dial
from cleave.rpc.probes import OPTIONS, Probes
from cleave.rpc.v1 import gang_pb2_grpc
from cleave_worker.agent import config
from cleave_worker.agent.authentication import AuthenticationInterceptor
from cleave_worker.agent.config import GANG_KEY_ENV, AgentConfig
from cleave_worker.agent.cpu_cores import list_online_cores
from cleave_worker.agent.gang.gang_link import SERVER_OPTIONS, GangAuthenticator, GangServer
from cleave_worker.agent.launch import MeetingPoint, find_free_port, has_gpu
from cleave_worker.agent.service import READY_SERVICE, make_authenticator

_log = logging.getLogger(__name__)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 1.0
_CHECK_TIMEOUT_S = 2.0
_DIAL_OPTIONS = (("grpc.max_reconnect_backoff_ms", 1000),)
"""gRPC's own back-off grows to two minutes: an agent that starts slowly would count as dead."""
_LOOPBACK = "127.0.0.1"
_END_GRACE_S = 15.0
"""Between the second signal to an agent, which then kills its engine, and SIGKILL."""


class CellError(ValueError):
    """The agents cannot share this container; one line with the reason."""


@dataclass(frozen=True, slots=True)
class CellAgent:
    """One agent of the cell."""

    arguments: tuple[str, ...]
    config: AgentConfig
    env: Mapping[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run until all agents are drained; return the exit code."""
    options = _build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    logs.configure(options.log_format)
    try:
        gpus, leader = has_gpu(), options.leader
        agents = plan_agents(options.agents, os.environ, has_gpus=gpus, is_leader=not leader)
        return asyncio.run(_Cell(agents, options.host, options.port, leader).run())
    except CellError as error:
        print(f"cleave-cell: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        print(f"cleave-cell: {error}", file=sys.stderr)  # noqa: T201
        return 1


def plan_agents(
    commands: Sequence[str], env: Mapping[str, str], *, has_gpus: bool, is_leader: bool = True
) -> list[CellAgent]:
    """Parse the agents' arguments (JSON lists) and give each its own GPUs or cores. `is_leader`:
    this pod has the first data-parallel ranks. Raises CellError."""
    arguments = [tuple(_parse_arguments(text)) for text in commands]
    configs = [config.parse(each, env) for each in arguments]
    _check_ranks(configs, is_leader)
    ports = [port for each in configs for port in (each.port, each.engine_port) if port]
    if len(set(ports)) < len(ports):
        raise CellError(f"ports {sorted(ports)} of the agents and engines must differ")
    sizes = [each.num_ranks for each in configs]
    if not any(each.engine == "vllm" for each in configs):
        return [CellAgent(args, each, env) for args, each in zip(arguments, configs, strict=True)]
    if has_gpus:
        shares = assign_gpus(sizes, env)
        return [
            CellAgent(args, each, {**env, _VISIBLE: share})
            for args, each, share in zip(arguments, configs, shares, strict=True)
        ]
    cores = assign_cores(sizes, frozenset(os.sched_getaffinity(0)), list_online_cores())
    return [
        # An option of the agent's own comes later and counts.
        CellAgent(("--cores", own, *args), each, env)
        for args, each, own in zip(arguments, configs, cores, strict=True)
    ]


def assign_gpus(sizes: Sequence[int], env: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine, of the container's GPUs in their order. Without the
    variable a container sees all GPUs that it was given. Raises CellError."""
    needed = sum(sizes)
    visible = iter([*filter(None, env[_VISIBLE].split(","))] if _VISIBLE in env else
                   map(str, range(needed)))  # fmt: skip
    shares = [",".join(islice(visible, size)) for size in sizes]
    found = sum(len(share.split(",")) for share in shares if share)
    if found < needed:
        raise CellError(f"the engines need {needed} GPUs, {_VISIBLE} names {found}")
    return shares


def assign_cores(
    sizes: Sequence[int], affinity: frozenset[int], online: frozenset[int]
) -> list[str]:
    """`--cores` of each engine. Cores that a static CPU manager has given to the container are
    divided in proportion to the sizes; otherwise each agent locks free ones by itself."""
    per_rank = len(affinity) // sum(sizes)
    if affinity >= online or not per_rank:
        return ["auto"] * len(sizes)
    cores = iter(sorted(affinity))
    return [",".join(map(str, islice(cores, size * per_rank))) for size in sizes]


def _check_ranks(configs: Sequence[AgentConfig], is_leader: bool) -> None:
    """Check that these are engines of a cell, or data-parallel ranks of one instance: all, or those
    of one of its pods, each with equally many in a row. Raises CellError."""
    sizes = {each.data_parallel_size for each in configs}
    ranks = sorted(each.data_parallel_rank for each in configs)
    if sizes == {1} and is_leader:
        return
    size, count, first = max(sizes), len(ranks), ranks[0]
    are_even = len(sizes) == 1 and size % count == 0 and first % count == 0
    if not are_even or ranks != [*range(first, first + count)] or is_leader != (first == 0):
        where = "without --leader" if is_leader else "with --leader"
        raise CellError(
            f"data-parallel ranks {ranks} of sizes {sorted(sizes)} {where}: a pod must have equally"
            " many ranks of one instance in a row, and those from 0 on need no --leader"
        )


class _Cell:
    """The running agents, and the health of all."""

    def __init__(self, agents: Sequence[CellAgent], host: str, port: int, leader: str) -> None:
        self._agents = agents
        self._host = host
        self._address = _format_address(host, port)
        size = agents[0].config.data_parallel_size
        self._gang_address = (leader or self._address) if size > 1 else ""
        self._gang_key = secrets.token_urlsafe()
        self._gang_size = 0 if leader else size
        self._processes: list[Process] = []
        self._is_stopping = False
        self._probes = Probes()

    async def run(self) -> int:
        """Run until all agents have ended. Raises OSError: port taken."""
        server = self._build_server()
        try:
            server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}") from error
        self._set_probes(is_alive=True, is_ready=False)
        await server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        watching = asyncio.create_task(self._watch_health())
        try:
            return await self._run_agents()
        finally:
            watching.cancel()
            await server.stop(None)

    def _build_server(self) -> grpc.aio.Server:
        """The server for probes, and for the agents of all data-parallel ranks if the first ones
        are here. Raises OSError: the token cannot be read."""
        first = self._agents[0].config
        others = make_authenticator(first, first.name.partition(".")[0], self._address)
        own = GangAuthenticator(self._gang_key, others) if others else None
        interceptors = [AuthenticationInterceptor(own)] if own else []
        options = [("grpc.so_reuseport", 0), *SERVER_OPTIONS, *OPTIONS]
        server = grpc.aio.server(interceptors=interceptors, options=options)
        self._probes.add_to(server)
        if self._gang_size > 1:
            gang = GangServer(self._gang_size, self._choose_meeting_point)
            gang_pb2_grpc.add_GangServicer_to_server(gang, server)
        return server

    def _choose_meeting_point(self) -> MeetingPoint:
        """vLLM's ZeroMQ sockets and torch's store check no key: they are open to the network only
        where ranks are in other pods."""
        host = _LOOPBACK if len(self._agents) == self._gang_size else self._host
        return MeetingPoint(host, find_free_port(host))

    async def _run_agents(self) -> int:
        for agent in self._agents:
            await self._start_agent(agent)
        endings = [asyncio.create_task(each.wait()) for each in self._processes]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        first = next(n for n, each in enumerate(endings) if each.done())
        name, status = self._agents[first].config.name, endings[first].result()
        # Data-parallel ranks are all drained when one is.
        is_drained = bool(self._gang_address) and status == 0
        if not (self._is_stopping or is_drained):
            _log.error("the agent of %s ended with status %d: the cell ends", name, status)
            await self._end_at_once(endings)
            return status if status == 2 else 1
        statuses = await asyncio.gather(*endings)
        return 0 if not any(statuses) else 1

    async def _start_agent(self, agent: CellAgent) -> None:
        of_gang = ["--gang", self._gang_address] if self._gang_address else []
        of_own_gang = {GANG_KEY_ENV: self._gang_key} if self._gang_size > 1 else {}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cleave_worker.agent.main", *of_gang, *agent.arguments,
            env={**agent.env, **of_own_gang}, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._processes.append(process)
        if self._is_stopping:
            process.terminate()

    async def _end_at_once(self, endings: Sequence["asyncio.Task[int]"]) -> None:
        self._is_stopping = True
        # The second signal ends an agent without a drain; between both it handles the first one.
        self._signal()
        await asyncio.wait(endings, timeout=_POLL_S)
        self._signal()
        await asyncio.wait(endings, timeout=_END_GRACE_S)
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await asyncio.wait(endings)

    def _on_signal(self) -> None:
        self._is_stopping = True
        self._signal()

    def _signal(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()

    async def _watch_health(self) -> None:
        channels = [dial(agent.config.address, _DIAL_OPTIONS) for agent in self._agents]
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        try:
            while True:
                await asyncio.sleep(_POLL_S)
                alive = await asyncio.gather(*(_is_serving(stub, "") for stub in stubs))
                ready = await asyncio.gather(*(_is_serving(stub, READY_SERVICE) for stub in stubs))
                self._set_probes(is_alive=all(alive), is_ready=all(ready))
        finally:
            for channel in channels:
                await channel.close()

    def _set_probes(self, *, is_alive: bool, is_ready: bool) -> None:
        self._probes.set("", is_serving=is_alive)
        self._probes.set(READY_SERVICE, is_serving=is_ready)


async def _is_serving(stub: health_pb2_grpc.HealthStub, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        response = await stub.Check(request, timeout=_CHECK_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _parse_arguments(text: str) -> list[str]:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise CellError(f"the arguments of an agent must be a JSON list of texts: {text!r:.80}")
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cleave-cell", description="Runs several agents and their engines in one container."
    )
    parser.add_argument("agents", nargs="+", metavar="ARGUMENTS", help="of an agent, a JSON list")
    parser.add_argument("--host", required=True)
    parser.add_argument(
        "--port", type=int, required=True, help="for probes and data-parallel ranks"
    )
    parser.add_argument(
        "--leader",
        metavar="HOST:PORT",
        default="",
        help="launcher of the pod with the first data-parallel ranks (default: this one)",
    )
    logs.add_option(parser, env=os.environ)
    return parser


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
