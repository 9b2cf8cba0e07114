"""What each fault does to an instance: its processes, its ports, its emulated engine."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import psutil

from cleave.rpc.engine_key import ENV, build_headers

from e2e.chaos import network
from e2e.chaos.faults import Fault
from e2e.chaos.gateways import CLIENT
from e2e.support.deployments import command

AGENT_PORT = 9000
RESTART_S = 20.0
"""Until an agent has started another engine; its back-off included."""
RESTART_LOOK_S = 0.2
INJECTED = {
    "freeze loop": lambda amount: {"hang": True},
    "slow": lambda amount: {"slow": 10},
    "refuse": lambda amount: {"refuse": True},
    "drop streams": lambda amount: {"drop": 5 * amount - 5},
    "corrupt hand-off": lambda amount: {"corrupt_handoff": amount},
    "stale hand-off": lambda amount: {"stale_handoff": amount},
    "short hand-off": lambda amount: {"short_handoff": amount},
    "swap hand-off": lambda amount: {"swap_handoff": amount},
    "wrong KV": lambda amount: {"wrong_kv": amount},
}
"""The faults that the emulated engine gets."""


class Worker:
    """The processes of one instance, as they are now. Raises LookupError without an engine."""

    def __init__(self, agent: psutil.Process) -> None:
        self.agent = agent
        self.tree = [agent, *agent.children(recursive=True)]
        self.engine = find_engine(self.tree)
        words = self.engine.cmdline()
        self.host = words[words.index("--host") + 1]
        self.engine_port = int(words[words.index("--port") + 1])
        self._headers = build_headers(self.engine.environ().get(ENV, ""))

    def find_ports(self, kind: str) -> set[int]:
        """What a cut of this kind concerns."""
        if kind == "cut agent":
            return {AGENT_PORT}
        if kind == "cut engine":
            return {self.engine_port}
        listening = {
            connection.laddr.port
            for process in (self.engine, *self.engine.children(recursive=True))
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        if kind == "cut KV":
            return listening - {self.engine_port}
        return {*listening, AGENT_PORT}

    def inject(self, **faults: object) -> None:
        CLIENT.post(self._faults_url, json=faults, headers=self._headers).raise_for_status()

    def clear(self) -> None:
        """It may have died of something else meanwhile."""
        with suppress(httpx.TransportError):
            CLIENT.delete(self._faults_url, headers=self._headers)

    @property
    def _faults_url(self) -> str:
        return f"http://{self.host}:{self.engine_port}/emulator/faults"


def find_engine(tree: list[psutil.Process]) -> psutil.Process:
    """The process of an instance that serves HTTP."""
    for process in tree:
        line = command(process)
        if ("api_server" in line or "emulator.main" in line) and "subreaper" not in line:
            return process
    raise LookupError("no engine runs")


@contextmanager
def inflicted(fault: Fault, worker: Worker) -> Iterator[None]:
    """The fault lasts while this is open; what is killed stays dead."""
    match fault.kind:
        case "kill engine":
            worker.engine.kill()
            yield
        case "kill agent":
            worker.agent.kill()
            yield
        case "kill worker":
            for process in worker.tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            yield
        case "slow start":
            worker.engine.kill()
            with stopped([find_next_engine(worker)]):
                yield
        case "hang engine":
            with stopped([worker.engine, *worker.engine.children(recursive=True)]):
                yield
        case "hang agent":
            with stopped([worker.agent]):
                yield
        case "cut engine" | "cut KV" | "cut agent" | "cut worker":
            with ExitStack() as stack:
                for port in worker.find_ports(fault.kind):
                    cut = network.Cut(worker.host, port, one_way=fault.amount > 2)
                    cut.make()
                    stack.callback(cut.mend)
                yield
        case kind:
            worker.inject(**INJECTED[kind](fault.amount))
            try:
                yield
            finally:
                worker.clear()


def find_next_engine(worker: Worker) -> psutil.Process:
    """The engine that the agent starts in place of a killed one. Raises LookupError."""
    end = time.monotonic() + RESTART_S
    while time.monotonic() < end:
        with suppress(LookupError, psutil.NoSuchProcess):
            engine = find_engine(worker.agent.children(recursive=True))
            if engine != worker.engine:
                return engine
        time.sleep(RESTART_LOOK_S)
    raise LookupError(f"no other engine within {RESTART_S:.0f} s")


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
