"""What a gateway holds on to: memory over a million requests, and beside ten thousand idle clients.

Called by run.py. One gateway with everything on, split requests, which use most of its code.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from environment import Cores, Stage
from figures import fit_cost
from processes import Load, Subject, measure_idle, read_resident_kib, run_load
from rich.console import Console
from rich.table import Table

SUBJECT = "cleave P/D"
MILLION = 1_000_000
WARM_UP_REQUESTS = 50_000
"""Until then caches and connections fill."""
ANSWER_TOKENS = 4
RUN_S = 5.0
CLIENTS = 10_000
SOURCES = 4
"""Addresses that clients come from: a pair of addresses has some 28,000 ports."""
CONNECTIONS = 32
LENGTHS = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the gateway after so many requests."""

    requests: int
    resident_kib: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """What a gateway takes while so many clients are connected and silent."""

    clients: int
    resident_kib: float
    idle_share: float
    """Of a core, without any request."""
    request_us: float
    ttft_p50_us: float
    ttft_p99_us: float


@contextmanager
def one_gateway(cores: Cores, step_us: int) -> Iterator[Subject]:
    with ExitStack() as stack:
        stage = Stage(stack, cores)
        stage.start_engines(step_us)
        yield stage.start_gateway(SUBJECT)


# ---- memory over requests ----


def measure_memory(cores: Cores, console: Console, num_requests: int) -> list[Sample]:
    samples = []
    with one_gateway(cores, step_us=0) as subject:
        served = 0
        while served < num_requests + WARM_UP_REQUESTS:
            load = Load(ANSWER_TOKENS, 2 * CONNECTIONS, RUN_S)
            served += run_load(subject, load, cores.load).requests
            samples.append(Sample(served, read_resident_kib(subject.pid)))
            console.print(f"{served:,} requests, {samples[-1].resident_kib:,.0f} KiB", style="dim")
    return samples


def build_memory_table(samples: Sequence[Sample]) -> Table:
    """The first sample after warming up is what all later ones are compared with."""
    table = Table(title="Memory of the gateway over requests")
    for column in ("requests", "MiB", "since warm, KiB", "bytes a request"):
        table.add_column(column, justify="right")
    warm = next(
        each for each in samples if each.requests >= WARM_UP_REQUESTS or each is samples[-1]
    )
    for each in samples:
        grown, since = each.resident_kib - warm.resident_kib, each.requests - warm.requests
        table.add_row(
            f"{each.requests:,}",
            f"{each.resident_kib / 1024:.2f}",
            f"{grown:,.0f}" if since > 0 else "-",
            f"{grown * 1024 / since:.3f}" if since > 0 else "-",
        )
    return table


# ---- idle clients ----


@contextmanager
def connected(subject: Subject, clients: int) -> Iterator[None]:
    """So many clients, each of which has been answered once and now says nothing."""
    host, port = subject.target.split(":")
    with ExitStack() as stack:
        for number in range(clients):
            source = f"127.78.0.{1 + number % SOURCES}", 0
            client = stack.enter_context(
                socket.create_connection((host, int(port)), 10, source_address=source)
            )
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: bench\r\n\r\n")
            if not client.recv(4096).startswith(b"HTTP/1.1 "):
                raise ConnectionError("a client got no answer")
        yield


def measure_crowds(cores: Cores, step_us: int, seconds: float, clients: int) -> list[Crowd]:
    with one_gateway(cores, step_us) as subject:
        run_load(subject, Load(ANSWER_TOKENS, 2 * CONNECTIONS, RUN_S), cores.load)
        alone = measure_crowd(subject, cores, seconds, 0)
        with connected(subject, clients):
            return [alone, measure_crowd(subject, cores, seconds, clients)]


def measure_crowd(subject: Subject, cores: Cores, seconds: float, clients: int) -> Crowd:
    resident_kib = read_resident_kib(subject.pid)
    idle = measure_idle(subject.pid, seconds)
    loads = [Load(tokens, CONNECTIONS, seconds) for tokens in LENGTHS]
    runs = [run_load(subject, load, cores.load) for load in loads]
    latency = run_load(subject, Load(16, 16, seconds), cores.load)
    return Crowd(
        clients,
        resident_kib,
        idle,
        fit_cost(runs, idle).request_us,
        latency.ttft_p50_us,
        latency.ttft_p99_us,
    )


def build_crowd_table(crowds: Sequence[Crowd]) -> Table:
    table = Table(title="Clients that are connected and silent")
    for column in ("clients", "MiB", "KiB each", "idle", "us/request", "TTFT p50 us", "p99 us"):
        table.add_column(column, justify="right")
    alone = crowds[0]
    for each in crowds:
        grown_kib = each.resident_kib - alone.resident_kib
        table.add_row(
            f"{each.clients:,}",
            f"{each.resident_kib / 1024:.1f}",
            f"{grown_kib / each.clients:.2f}" if each.clients else "-",
            f"{each.idle_share:.2%}",
            f"{each.request_us:.1f}",
            f"{each.ttft_p50_us:,.0f}",
            f"{each.ttft_p99_us:,.0f}",
        )
    return table


def to_rows(values: Sequence[Sample | Crowd]) -> list[dict[str, float]]:
    return [asdict(each) for each in values]
