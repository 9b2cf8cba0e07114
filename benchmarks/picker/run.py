"""What a pick through the endpoint picker costs the gateway, and how long a proxy waits for it.

    python -m benchmarks.picker.run [--seconds 5] [-o json]

A real gateway on a core of its own follows a made-up agent; a client on another says what Envoy
says, in Envoy's order. There are no engines: the client also sends their answers.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psutil

from cleave.rpc.v1 import external_processor_pb2 as pb
from cleave.rpc.v1 import external_processor_pb2_grpc

from tests.support.certificates import NAME, Files

HERE = Path(__file__).parent
AGENTS = HERE.parent / "gateway" / "mock_agents.py"
BODY = json.dumps({"model": "bench", "stream": True, "max_tokens": 64, "prompt": "x" * 1_000})
EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" word","token_ids":[1]}]}\n\n'.ljust(
    210
)
PATH = pb.HeaderValue(key=":path", raw_value=b"/v1/completions")
METHOD = pb.HeaderValue(key=":method", raw_value=b"POST")


@dataclass(frozen=True, slots=True)
class Case:
    """A way in which a proxy may ask."""

    name: str
    events: int
    """Of the answer's body; 0: the picker does not hear of an answer."""


CASES = (
    Case("answer not told", 0),
    Case("answer of 65 pieces", 65),
)


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    requests: int
    us: float
    """CPU of the gateway for each request, without what it uses at rest."""
    wait_p50_us: float
    wait_p99_us: float
    """From the last piece of the request to the picker's answer, one request at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each case")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder)).write()
        for case in CASES:
            with gateway(cores[0], files) as (process, port):
                measured = measure(case, process, port, files, arguments)
                rows.append(asyncio.run(measured))
    if arguments.output == "json":
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'':36} {'us CPU':>8} {'wait us p50':>12} {'p99':>7}")
    for row in rows:
        print(f"{row.case:36} {row.us:8.0f} {row.wait_p50_us:12.0f} {row.wait_p99_us:7.0f}")


@contextmanager
def gateway(core: int, files: Files) -> Iterator[tuple[psutil.Process, int]]:
    """A gateway on that core, and its picker's port, which shows the certificate in the files."""
    agent, port, picker = (find_port() for _ in range(3))
    with ExitStack() as stack:
        served = ["-m", "cleave.gateway.main", "--agents", f"127.0.0.1:{agent}"]
        served += ["--port", str(port), "--endpoint-picker-port", str(picker)]
        served += ["--endpoint-picker-cert", str(files.certificate)]
        served += ["--endpoint-picker-key", str(files.key)]
        for line in ([str(AGENTS), f"mixed,boot,127.0.0.1:9,127.0.0.1:{agent}"], served):
            process = subprocess.Popen([sys.executable, *line], stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        os.sched_setaffinity(process.pid, {core})
        yield psutil.Process(process.pid), picker


async def measure(
    case: Case, process: psutil.Process, port: int, files: Files, arguments: argparse.Namespace
) -> Row:
    seconds, clients = arguments.seconds, arguments.clients
    proof = grpc.ssl_channel_credentials(files.certificate.read_bytes())
    named = (("grpc.ssl_target_name_override", NAME),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", proof, named) as channel:
        stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
        await ready(stub, case)
        await run(stub, case, 1.0, clients)
        start = read_cpu_s(process)
        await asyncio.sleep(2.0)
        rest = (read_cpu_s(process) - start) / 2.0
        start, began = read_cpu_s(process), time.perf_counter()
        waits = await run(stub, case, seconds, clients)
        used = read_cpu_s(process) - start - rest * (time.perf_counter() - began)
        alone = sorted(await run(stub, case, min(seconds, 3.0), 1))
    return Row(
        case.name,
        len(waits),
        used / len(waits) * 1e6,
        statistics.median(alone) * 1e6,
        alone[int(len(alone) * 0.99)] * 1e6,
    )


async def ready(stub: external_processor_pb2_grpc.ExternalProcessorStub, case: Case) -> None:
    for _ in range(200):
        try:
            await ask(stub, case)
            return
        except (grpc.aio.AioRpcError, AssertionError):
            await asyncio.sleep(0.1)
    raise SystemExit("the gateway is not ready within 20 s")


async def run(
    stub: external_processor_pb2_grpc.ExternalProcessorStub,
    case: Case,
    seconds: float,
    clients: int,
) -> list[float]:
    """Waits in seconds."""
    end = time.perf_counter() + seconds
    waits: list[float] = []

    async def ask_on() -> None:
        while time.perf_counter() < end:
            waits.append(await ask(stub, case))

    await asyncio.gather(*(ask_on() for _ in range(clients)))
    return waits


async def ask(stub: external_processor_pb2_grpc.ExternalProcessorStub, case: Case) -> float:
    """One request and its answer; how long it waited for the pick, in seconds."""
    stream = stub.Process()
    modes = pb.ProtocolConfiguration(
        request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
    )
    head = pb.HttpHeaders(headers=pb.HeaderMap(headers=[METHOD, PATH]))
    await stream.write(pb.ProcessingRequest(request_headers=head, protocol_config=modes))
    start = time.perf_counter()
    body = pb.HttpBody(body=BODY.encode(), end_of_stream=True)
    await stream.write(pb.ProcessingRequest(request_body=body))
    first = await stream.read()
    waited = time.perf_counter() - start
    assert first is not grpc.aio.EOF
    assert first.HasField("request_headers"), first
    assert (await stream.read()).HasField("request_body")
    if case.events:
        await send_case(stream, case)
    else:
        await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    return waited


async def send_case(stream: grpc.aio.StreamStreamCall, case: Case) -> None:
    """The answer, as the proxy hears it from an engine."""
    status = pb.HeaderMap(headers=[pb.HeaderValue(key=":status", raw_value=b"200")])
    await stream.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=status)))
    await stream.read()
    for number in range(1, case.events + 1):
        piece = pb.HttpBody(body=EVENT, end_of_stream=number == case.events)
        await stream.write(pb.ProcessingRequest(response_body=piece))
        assert (await stream.read()).HasField("response_body")
    await stream.done_writing()


def read_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
