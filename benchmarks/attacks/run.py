"""A gateway under attack, from outside: its memory, and what its other clients feel of it.

`python benchmarks/attacks/run.py [NAME ...]`: half a minute an attack, a fresh gateway each. Two
emulated instances serve behind it. Victims stream short completions with a key, each on a
connection of its own, first alone and then beside the attack, which is a process of its own. Run
it on a quiet machine: attacker, gateway and engines share its cores. Exit status 1: a limit was
missed twice. `--gateway PYTHON`: attack the gateway of another checkout, whose interpreter it is.

Each callback of the gateway's event loop is measured (measured_gateway.py): the longest one, in CPU
time, is a column. Parts of it that this machine causes count as well, so an attack that misses a
limit is tried once more.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from attacks import ATTACKS, Attack, trust_all

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from result_table import show

from tests.support.certificates import Files

KEY = "benchmark-key-of-no-value"
MODEL = "facebook/opt-13b"
MEMORY_LIMIT_MIB = 256
LATENCY_LIMIT = 2.0
BLOCK_LIMIT_MS = 5.0
GIVEN_UP_MIB = 2048
"""A gateway that has grown so far has lost; the machine is spared."""
START_S = 60.0
REQUEST_S = 20.0
VICTIMS = 4
HOSTILE_PORT = 21_001
PAUSE_S = 0.05
"""Between two requests of a victim."""


@dataclass(slots=True)
class Felt:
    """What victims felt in one phase."""

    ttfts_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        if len(self.ttfts_ms) < 2:
            return float("inf")
        return statistics.quantiles(self.ttfts_ms, n=100)[round(share * 100) - 1]


@dataclass(frozen=True, slots=True)
class Gateway:
    process: subprocess.Popen[bytes]
    port: int
    internal_port: int
    blocks: Path
    tls: ssl.SSLContext | None

    def take_worst_block(self) -> dict[str, float | str]:
        """The longest callback since the last call; none: it does not answer."""
        self.blocks.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
        for _ in range(100):
            if self.blocks.exists():
                return dict(json.loads(self.blocks.read_text()))
            time.sleep(0.05)
        return {"ms": float("inf"), "gc_ms": 0.0, "where": "it does not answer"}

    def peak_mib(self) -> float:
        """Most resident memory since `forget_peak`; infinite once the process is gone."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        return float("inf")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def page(self, path: str) -> str:
        """A page of the internal port; empty when it does not answer within 5 s."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.internal_port}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read(), "utf-8", "replace")
        return ""

    def retries(self) -> float:
        """Requests that were sent to another engine, for any reason."""
        lines = self.page("/metrics").splitlines()
        counted = ("cleave_gateway_retries_total{", "cleave_gateway_recoveries_total{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(counted))


def main() -> None:
    """Attack, print, check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (default: 10)")
    parser.add_argument("--gateway", default=sys.executable, metavar="PYTHON")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args()
    rows, missed = [], []
    for name in given.names or ATTACKS:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(name, given.seconds, given.gateway, Path(folder)))
            print(f"{name}: {rows[-1]['verdict']}", file=sys.stderr)
            if rows[-1]["verdict"] == "holds":
                break
        else:
            missed.append(name)
    show({"attacks": rows}, given.output, 150, lambda _, value: str(value))
    sys.exit(f"limits missed twice: {', '.join(missed)}" if missed else 0)


def measure(name: str, seconds: float, python: str, folder: Path) -> dict[str, object]:
    """One attack on a fresh gateway."""
    with served(python, folder, ATTACKS[name]) as gateway:
        asyncio.run(watch(gateway, 2.0, None))  # warms up
        gateway.forget_peak()
        gateway.take_worst_block()
        alone, _ = asyncio.run(watch(gateway, seconds, None))
        idle_mib, retries = gateway.peak_mib(), gateway.retries()
        before = gateway.take_worst_block()
        command = [sys.executable, str(Path(__file__).with_name("attacks.py")), name]
        command += [str(gateway.port), str(seconds + 1), KEY]
        attack = subprocess.Popen(command, preexec_fn=keep_aside)
        try:
            with counted_bytes(gateway.port) as counted:
                time.sleep(1)
                attacked, answered = asyncio.run(watch(gateway, seconds, attack))
        finally:
            attack.kill()
            attack.wait()
        queued_mib = max(map(int, counted)) / (1 << 20)
        peak_mib, block = gateway.peak_mib(), gateway.take_worst_block()
        time.sleep(0.5)
        retried = gateway.retries() - retries
    ratios = [attacked.quantile(share) / alone.quantile(share) for share in (0.5, 0.99)]
    missed = [
        *(["memory"] if peak_mib + queued_mib > MEMORY_LIMIT_MIB else []),
        *(["latency"] if max(ratios) > LATENCY_LIMIT else []),
        *([f"block: {block['where']}"] if block["ms"] > BLOCK_LIMIT_MS else []),
        *(["failures"] if attacked.failures else []),
        *(["internal port"] if not answered else []),
        *(["engines judged"] if retried else []),
    ]
    return {
        "attack": name,
        "MiB alone": round(idle_mib),
        "MiB": round(peak_mib) if peak_mib < float("inf") else "killed",
        "in sockets": round(queued_mib),
        "TTFT p50 ms": f"{alone.quantile(0.5):.0f} -> {attacked.quantile(0.5):.0f}",
        "p99 ms": f"{alone.quantile(0.99):.0f} -> {attacked.quantile(0.99):.0f}",
        "ratio p50, p99": ", ".join(f"{ratio:.2f}" for ratio in ratios),
        "block ms": f"{before['ms']:.1f} -> {block['ms']:.1f}",
        "requests": len(attacked.ttfts_ms),
        "failed": len(attacked.failures),
        "internal": "answers" if answered else "silent",
        "retries": round(retried),
        "verdict": "misses: " + ", ".join(missed) if missed else "holds",
    }


@contextlib.contextmanager
def counted_bytes(port: int) -> Iterator[list[str]]:
    """What sockets of this port hold, in bytes; filled at the end."""
    counted: list[str] = []
    command = [sys.executable, str(Path(__file__).with_name("queued_bytes.py")), str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=keep_aside
    ) as counter:
        yield counted
        counter.kill()
        counted += counter.communicate()[0].split()


async def watch(
    gateway: Gateway, seconds: float, attack: subprocess.Popen[bytes] | None
) -> tuple[Felt, bool]:
    """Victims for so long; whether the internal port has answered every second.

    `attack`: ended at once when the gateway has grown beyond all measure.
    """
    felt, deadline, answered = Felt(), time.monotonic() + seconds, True
    async with asyncio.TaskGroup() as group:
        for _ in range(VICTIMS):
            group.create_task(suffer(gateway, deadline, felt))
        while time.monotonic() < deadline:
            await asyncio.sleep(1)
            page = await asyncio.to_thread(gateway.page, "/health")
            answered = answered and bool(page)
            if attack is not None and gateway.peak_mib() > GIVEN_UP_MIB:
                attack.kill()
    return felt, answered


async def suffer(gateway: Gateway, deadline: float, felt: Felt) -> None:
    """One victim: request after request, each on a new connection."""
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(REQUEST_S):
                felt.ttfts_ms.append(await complete(gateway))
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            felt.failures.append(repr(error))
        await asyncio.sleep(PAUSE_S)


async def complete(gateway: Gateway) -> float:
    """Stream a completion of eight tokens whole; time to its first event in ms."""
    body = json.dumps({"model": MODEL, "prompt": "x" * 200, "max_tokens": 8, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=gateway.tls)
    try:
        writer.write((head + body).encode())
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status[:20]:
            raise ValueError(status[:60].decode())
        await reader.readuntil(b"data: ")
        ttft_ms = (time.monotonic() - began) * 1e3
        await reader.readuntil(b"data: [DONE]")
    finally:
        writer.close()
    return ttft_ms


def keep_aside() -> None:
    """An attacker stands for another machine: one core, and little of it where others want it."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(5)


@contextlib.contextmanager
def served(python: str, folder: Path, attack: Attack) -> Iterator[Gateway]:
    """A gateway with a key before two emulated instances, all ended at the end."""
    keys, log, blocks = folder / "keys", folder / "log", folder / "blocks"
    keys.write_text(KEY + "\n")
    agents = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    peers = ",".join(agents)
    with contextlib.ExitStack() as stack:
        for number, address in enumerate(agents):
            worker = ["cleave_worker.agent.main", "--name", f"mixed-{number}", "--deployment", "d"]
            worker += ["--role", "mixed", "--model", MODEL, "--engine", "emulated"]
            worker += ["--host", "127.0.0.1", "--port", address.partition(":")[2]]
            worker += ["--peers", peers, "--cores", "none"]
            stack.enter_context(running([sys.executable, "-m", *worker], log))
        if attack.agents:
            hostile = [sys.executable, str(Path(__file__).with_name("hostile_agents.py"))]
            hostile += [str(HOSTILE_PORT), str(attack.agents), *["flood"] * attack.floods]
            stack.enter_context(running(hostile, log, keep_aside))
            agents += [f"127.0.0.1:{HOSTILE_PORT + number}" for number in range(attack.agents)]
        port, internal_port = free_port(), free_port()
        measured = str(Path(__file__).with_name("measured_gateway.py"))
        command = [python, measured, str(blocks), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--internal-port", str(internal_port)]
        command += ["--agents", ",".join(agents), "--api-keys", str(keys)]
        if attack.is_tls:
            files = Files(folder).write()
            command += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
        prepare = partial(limit_files, attack.open_files) if attack.open_files else None
        process = stack.enter_context(running(command, log, prepare))
        tls = trust_all() if attack.is_tls else None
        gateway = Gateway(process, port, internal_port, blocks, tls)
        deadline = time.monotonic() + START_S
        # Agents check the KV paths when they start, which takes time of the engines.
        while log.read_text().count("KV path verified") < 4 or '"ok"' not in gateway.page(
            "/health"
        ):
            if time.monotonic() > deadline:
                sys.exit(f"not healthy within {START_S:.0f} s:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield gateway


def limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, prepare: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=prepare
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
