"""The gateway's own Python, without sockets: CPU time and calls of a request and of a token.

`python benchmarks/gateway/in_process.py`; `--compiled` as images carry it, `--profile` shows where
the time goes, interpreted. Everything that a request meets is the real thing, from the bytes of the
client to the bytes for it; only the transports are lists. What is hard: CPU time of a whole proxy
is half the kernel's and differs by a tenth from run to run. The number of calls does not differ, so
that is what a test holds on to.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any, cast

from mock_agents import KV_BLOCKS, describe
from mock_agents import Instance as Mock
from processes import build_gateway
from rich.console import Console
from rich.table import Table

from cleave.api.enums import LateRequestPolicy
from cleave.gateway.admission.api_keys import ApiKeys
from cleave.gateway.admission.rate_limit import TenantLimits
from cleave.gateway.admission.tenants import Tenant, hash_key
from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.handlers import GatewayRequestHandler
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.http.address_debts import SETTLED
from cleave.gateway.http.write_batcher import WriteBatcher
from cleave.gateway.proxy import proxied_request
from cleave.gateway.upstream.connection_pool import EngineConnection
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2

KEY = "a-key-of-the-benchmark"
ANSWER_TOKENS = 16
_DATE = b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"


class Wire:
    """A transport whose other side is a list."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.write = self.sent.append

    def get_extra_info(self, name: str, default: int | None = None) -> int | None:
        del name
        return default

    def set_write_buffer_limits(self, high: int) -> None:
        del high

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True

    def abort(self) -> None:
        raise RuntimeError("the gateway has given a connection up")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one way to serve."""

    request_us: float
    """A streamed request with its head, role, last event and end, but without tokens."""
    token_us: float
    whole_us: float
    """A request whose answer comes in one piece."""
    request_calls: int
    token_calls: float


class Bench:
    """A gateway between one client and its engines, all in this thread."""

    def __init__(self, roles: tuple[str, ...], *, everything: bool) -> None:
        """`everything`: a tenant with limits, and targets to measure against."""
        self._context = _build_context(everything)
        self._outbox = self._context.write_batcher = WriteBatcher(schedule=_leave)
        # The hand-off in the prefill engine's answer names its request: each has the first id.
        self._prefill = _write_prefill(self._context.make_request_id())
        self._client = ClientConnection(
            self._context, GatewayRequestHandler(self._context), self._context.client_limiter
        )
        # A known client takes no turn, for which there is no event loop here.
        self._context.address_debts.add("", -SETTLED)
        self._wire = _connect(self._client)
        self._engines: dict[str, tuple[EngineConnection, Wire]] = {}
        for place, role in enumerate(roles):
            self._engines[role] = self._start_engine(role, place)
        self._authorized = everything

    def serve(self, tokens: int, *, stream: bool = True) -> None:
        """One request, from its first byte to the last of its answer."""
        self._context._last_id = 0
        self._client.data_received(_write_request(tokens, stream, self._authorized))
        self._outbox.flush()
        if "prefill" in self._engines:
            self._answer("prefill", (self._prefill,))
        role = "decode" if "decode" in self._engines else "mixed"
        self._answer(role, (_HEAD, _ROLE, *[_TOKEN] * tokens, _LAST, _END) if stream else (_WHOLE,))
        sent = self._wire.sent
        if not sent or not sent[-1].endswith(b"}" if not stream else b"0\r\n\r\n"):
            raise RuntimeError(f"not the end of an answer: {sent[-1:]}")
        sent.clear()

    def _answer(self, role: str, pieces: tuple[bytes, ...]) -> None:
        connection, wire = self._engines[role]
        if len(wire.sent) != 1:
            raise RuntimeError(f"the {role} engine got {len(wire.sent)} requests")
        wire.sent.clear()
        receive = connection.data_received
        for piece in pieces:
            receive(piece)
            self._outbox.flush()

    def _start_engine(self, role: str, place: int) -> tuple[EngineConnection, Wire]:
        directory = self._context.router.registry
        address = f"127.0.0.1:{7001 + place}"
        registration = describe(Mock(role, f"boot-{role}", address, address))
        directory.on_event(address, agent_pb2.WatchEvent(registration=registration), 0.0)
        load = agent_pb2.LoadReport(boot_id=registration.boot_id, kv_blocks_free=KV_BLOCKS)
        directory.on_event(address, agent_pb2.WatchEvent(load=load), 0.0)
        pool = self._context.get_pool(directory.instances[registration.instance].target)
        connection = EngineConnection(pool)
        wire = _connect(connection)
        pool.return_idle(connection)
        return connection, wire


def _leave(work: Callable[[], None]) -> None:
    """There is no event loop: each turn is ended by hand."""


def _build_context(everything: bool) -> GatewayContext:
    if not everything:
        config = GatewayConfig(agents="")
        return GatewayContext(config, Router(InstanceRegistry(), seed=1), ApiKeys(None))
    config = GatewayConfig(
        agents="", ttft_slo_ms=200.0, tpot_slo_ms=50.0, late_policy=LateRequestPolicy.SERVE
    )
    limits = TenantLimits(1_000_000_000, 1_000_000_000, 1_000_000)
    tenant = Tenant("bench", limits)
    return GatewayContext(
        config, Router(InstanceRegistry(), seed=1), ApiKeys({hash_key(KEY.encode()): tenant})
    )


def _connect(connection: ClientConnection | EngineConnection) -> Wire:
    wire = Wire()
    connection.connection_made(cast("Any", wire))
    return wire


# ---- what clients and engines write, as load.c and engine.c do ----


@cache
def _write_request(tokens: int, stream: bool, authorized: bool) -> bytes:
    body = json.dumps(
        {
            "model": "bench",
            "messages": [
                {"role": "user", "content": "s10000001 " + "lorem ipsum dolor sit amet " * 38}
            ],
            "max_tokens": max(tokens, 1),
            "temperature": 0.0,
            "stream": stream,
        },
        separators=(",", ":"),
    ).encode()
    key = f"Authorization: Bearer {KEY}\r\n" if authorized else ""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nUser-Agent: load\r\nAccept: */*\r\n"
        f"{key}X-Request-Id: load-10000001\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _write_event(delta: str, finish: str = "null", prompt: str = "") -> bytes:
    event = (
        'data: {"id":"chatcmpl-3f0c1f6d9a4b4f5e8b7a00989681","object":"chat.completion.chunk",'
        f'"created":1767225600,"model":"bench","choices":[{{"index":0,"delta":{{{delta}}},'
        f'"logprobs":null,"finish_reason":{finish},"token_ids":[1001]}}]{prompt}}}\n\n'
    ).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _write_whole(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
        % (_DATE, len(body), body)
    )


_HEAD = (
    b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n" % _DATE
)
_PROMPT_IDS = ',"prompt_token_ids":[' + ",".join(["1001"] * 256) + "]"
_ROLE = _write_event('"role":"assistant","content":""', prompt=_PROMPT_IDS)
_TOKEN = _write_event('"content":" t00001.s10000001"')
_LAST = _write_event('"content":""', '"stop"')
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_WHOLE = _write_whole(
    b'{"id":"chatcmpl-load-1","object":"chat.completion","created":1767225600,"model":"bench",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":" t00015.s10000001"},'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],'
    b'"usage":{"prompt_tokens":256,"total_tokens":272,"completion_tokens":16},'
    b'"prompt_logprobs":null,"kv_transfer_params":null}'
)


def _write_prefill(request_id: bytes) -> bytes:
    return _write_whole(
        b'{"id":"chatcmpl-load-1","object":"chat.completion","created":1767225600,'
        b'"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":" x"},'
        b'"logprobs":null,"finish_reason":"length","stop_reason":null}],'
        b'"usage":{"prompt_tokens":256,"total_tokens":257,"completion_tokens":1},'
        b'"prompt_logprobs":null,"kv_transfer_params":'
        b'{"do_remote_prefill":true,"do_remote_decode":false,'
        b'"remote_block_ids":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]],'
        b'"remote_engine_id":"boot-prefill","remote_request_id":"chatcmpl-%b-0-82a6113c",'
        b'"remote_host":"127.0.0.1","remote_port":5601,"tp_size":1,"remote_num_tokens":256}}'
        % request_id
    )


# ---- measuring ----


def count_calls(work: Callable[[], None]) -> int:
    """Cleave's own functions that `work` calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        nonlocal count
        count += event == "call" and "/cleave/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def clock_us(work: Callable[[], None], times: int, rounds: int) -> float:
    """CPU time of one `work`, the least of all rounds: what disturbs only adds."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(times):
            work()
        best = min(best, time.process_time() - begun)
    return best / times * 1e6


def measure(roles: tuple[str, ...], *, everything: bool, rounds: int, times: int) -> Figures:
    bench = Bench(roles, everything=everything)

    def spend(tokens: int, *, stream: bool = True) -> float:
        return clock_us(partial(bench.serve, tokens, stream=stream), times, rounds)

    empty, full = spend(0), spend(ANSWER_TOKENS)
    calls, calls_full = (count_calls(partial(bench.serve, n)) for n in (0, ANSWER_TOKENS))
    return Figures(
        request_us=empty,
        token_us=(full - empty) / ANSWER_TOKENS,
        whole_us=spend(ANSWER_TOKENS, stream=False),
        request_calls=calls,
        token_calls=(calls_full - calls) / ANSWER_TOKENS,
    )


CASES = {
    "plain": (("mixed",), False),
    "plain, everything on": (("mixed",), True),
    "P/D": (("prefill", "decode"), False),
    "P/D, everything on": (("prefill", "decode"), True),
}


def build_table(figures: dict[str, Figures]) -> Table:
    table = Table(title="Python alone, least CPU time of all rounds")
    table.add_column("case")
    for column in ("us/request", "us/token", "us whole answer", "calls/request", "calls/token"):
        table.add_column(column, justify="right")
    for name, one in figures.items():
        table.add_row(
            name,
            f"{one.request_us:.2f}",
            f"{one.token_us:.2f}",
            f"{one.whole_us:.2f}",
            str(one.request_calls),
            f"{one.token_calls:.2f}",
        )
    return table


def show_profile(name: str, requests: int) -> None:
    roles, everything = CASES[name]
    bench = Bench(roles, everything=everything)
    bench.serve(0)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(requests):
        bench.serve(0)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=400, help="in each round")
    parser.add_argument("--compiled", action="store_true", help="as images carry it")
    parser.add_argument("--profile", choices=CASES, help="where the time of one case goes")
    arguments = parser.parse_args()
    if arguments.compiled and not proxied_request.__file__.endswith(".so"):
        environment = os.environ | {"PYTHONPATH": str(build_gateway())}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    if arguments.profile:
        show_profile(arguments.profile, arguments.requests * arguments.rounds)
        return 0
    figures = {
        name: measure(
            roles, everything=everything, rounds=arguments.rounds, times=arguments.requests
        )
        for name, (roles, everything) in CASES.items()
    }
    Console().print(build_table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
