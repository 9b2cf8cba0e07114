"""TLS of clients: bytes in any pieces, pauses, damage; and what a connection takes of memory."""

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave.gateway.app import tls_connection as tls_module
from cleave.gateway.app.client_connection import CONNECTION_BYTES
from cleave.gateway.app.tls_connection import (
    HANDSHAKE_BYTES,
    RETRY_BYTES,
    TLS_BYTES,
    TURN_BYTES,
    TlsConnection,
)
from cleave.gateway.http.address_debts import SETTLED

from tests.support.certificates import NAME, Files
from tests.support.ports import find_free_port

FIRST_BYTES = b"\x16\x03\x01\x00\x80\x01\x00\x00\x7c"
"""Of a first message of 124 bytes."""
ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write()


@pytest.fixture
async def stage(make_stage, files: Files):
    return await make_stage({"x": "mixed"}, tls_certificate=files.certificate, tls_key=files.key)


@pytest.fixture
async def make_client(files: Files):
    """Makes clients, which are cut off at the end."""
    clients: list[TlsClient] = []

    async def make(port: int, pieces: int = 1 << 16) -> TlsClient:
        clients.append(TlsClient(files.trust()))
        return await clients[-1].connect(port, pieces)

    make.trust = files.trust()
    yield make
    for client in clients:
        client.close()
    await asyncio.sleep(0)


class TlsClient:
    """A client that decides itself which encrypted bytes are sent when."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=NAME)

    async def connect(self, port: int, pieces: int = 1 << 16) -> "TlsClient":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self.send(self._outgoing.read(), pieces)
                self._incoming.write(await self.reader.read(1 << 16))
        await self.send(self._outgoing.read(), pieces)
        return self

    def close(self) -> None:
        self.writer.transport.abort()

    async def send(self, encrypted: bytes, size: int) -> None:
        for start in range(0, len(encrypted), size):
            self.writer.write(encrypted[start : start + size])
            await self.writer.drain()
            await asyncio.sleep(0)

    def encrypt(self, data: bytes, size: int = 1 << 14) -> bytes:
        """In records of so many bytes."""
        for start in range(0, len(data), size):
            self.tls.write(data[start : start + size])
        return self._outgoing.read()

    def encrypt_end(self) -> bytes:
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self._outgoing.read()

    async def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                data += self.tls.read(1 << 16)
            except ssl.SSLWantReadError:
                encrypted = await asyncio.wait_for(self.reader.read(1 << 16), 30)
                assert encrypted, "the gateway has closed the connection"
                self._incoming.write(encrypted)
        return data

    async def read_statuses(self, count: int) -> list[int]:
        """Of so many responses with a length."""
        statuses, data = [], bytearray()
        for _ in range(count):
            while (end := data.find(b"\r\n\r\n") + 4) < 4:
                data += await self.read(1)
            lines = bytes(data[:end]).lower().split(b"\r\n")
            (length,) = (line for line in lines if line.startswith(b"content-length:"))
            end += int(length.split(b":")[1])
            while len(data) < end:
                data += await self.read(1)
            statuses.append(int(data[9:12]))
            del data[:end]
        return statuses


def build(body: dict) -> bytes:
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n"
    return head % len(raw) + raw


@pytest.mark.parametrize("name", ["_enter", "_begin", "buffer_updated"])
async def test_a_fault_in_a_handshake_ends_it_alone(stage, make_client, monkeypatch, name) -> None:
    original, failed = getattr(TlsConnection, name), []

    def fail_once(self, *arguments):
        if not failed:
            failed.append(self)
            raise ValueError
        return original(self, *arguments)

    monkeypatch.setattr(TlsConnection, name, fail_once)
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.gateway.port)
    writer.write(FIRST_BYTES)
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    assert failed
    await make_client(stage.gateway.port)


async def test_bytes_may_come_in_any_pieces(stage, make_client) -> None:
    for size in (1, 7, 5_000):
        client = await make_client(stage.gateway.port, pieces=size)
        asks = build(ASK) + build(ASK | {"prompt": "y" * (20_000 if size > 1 else 10)}) + build(ASK)
        await client.send(client.encrypt(asks, size=1_000), size)
        assert await client.read_statuses(3) == [200, 200, 200]
    await stage.until_idle()


async def test_pipelined_requests_wait_while_one_is_answered(stage, make_client) -> None:
    opened = stage.hold()
    client = await make_client(stage.gateway.port)
    await client.send(client.encrypt(build(ASK) * 300, size=37), 1 << 16)
    await stage.until(lambda: bool(stage.engines["x"].requests), "the first runs")
    await asyncio.sleep(0.1)
    assert stage.context.buffer_budget.used < 1 << 20, "the rest is left unread"
    opened.set()
    assert await client.read_statuses(300) == [200] * 300


async def test_a_turn_decrypts_few_bytes_however_many_records_come(
    stage, make_client, monkeypatch
) -> None:
    turns: list[int] = []

    class Counted(TlsConnection):
        def buffer_updated(self, nbytes: int) -> None:
            if not turns:
                asyncio.get_running_loop().call_soon(turns.clear)
            turns.append(nbytes)
            most.append(sum(turns))
            super().buffer_updated(nbytes)

    most: list[int] = []
    monkeypatch.setattr("cleave.gateway.server.TlsConnection", Counted)
    client = await make_client(stage.gateway.port)
    await client.send(client.encrypt(build(ASK | {"prompt": "z" * 30_000}), size=1), 1 << 20)
    assert await client.read_statuses(1) == [200]
    assert TURN_BYTES // 2 < max(most) <= TURN_BYTES


async def test_what_a_paused_client_sends_is_left_in_the_kernel_or_counted(
    stage, make_client
) -> None:
    """It reads none of its answers, so its requests wait."""
    client = await make_client(stage.gateway.port)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.reader._transport.pause_reading()
    asks = client.encrypt(b"GET /openapi.json HTTP/1.1\r\nHost: g\r\n\r\n" * 200_000)
    client.writer.write(asks)
    await stage.until(lambda: not len(stage.context.handshake_limiter), "it is over")
    (connection,) = [each.transport for each in stage.context.clients]
    await stage.until(lambda: connection._is_paused, "it waits")
    await asyncio.sleep(0.2)
    assert client.writer.transport.get_write_buffer_size() > 0, "the kernel is full"
    assert 0 < stage.context.buffer_budget.used < 400_000


async def test_answers_are_whole_for_a_client_that_limits_the_length_of_records(
    stage, files: Files
) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{stage.gateway.port}"]
    command += ["-maxfraglen", "512", "-quiet", "-no_ign_eof", "-servername", NAME]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"GET /openapi.json HTTP/1.1\r\nHost: g\r\n\r\n")
    async with asyncio.timeout(30):
        head = (await client.stdout.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert length > 10_000
        body = json.loads(await client.stdout.readexactly(length))
    client.kill()
    await client.wait()
    assert body["openapi"]


@pytest.mark.parametrize(("version", "letter"), [("-tls1_3", b"K"), ("-tls1_2", b"R")])
async def test_a_client_may_ask_for_new_keys_but_not_for_a_new_handshake(
    stage, version: str, letter: bytes
) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{stage.gateway.port}", version]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert client.stdin is not None
    assert client.stdout is not None
    async with asyncio.timeout(30):
        await client.stdout.readuntil(b"Verify return code")
        for _ in range(3 if letter == b"K" else 1):
            client.stdin.write(letter + b"\n")
            await asyncio.sleep(0.1)
        if letter == b"K":
            client.stdin.write(b"GET /nowhere HTTP/1.1\r\nHost: g\r\n\r\n")
            await client.stdout.readuntil(b"404 ")
            client.kill()
        await client.wait()
    await stage.until(lambda: not stage.context.clients, "it is closed")


async def test_an_answer_that_is_not_read_waits_and_is_whole(stage, make_client) -> None:
    async def answer_much(engine, request, writer) -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        engine.send_json(writer, {"choices": [{"text": "x" * 5_000_000}], "usage": usage})

    stage.engines["x"].script = answer_much
    client = await make_client(stage.gateway.port)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    client.reader._transport.pause_reading()
    await client.send(client.encrypt(build(ASK)), 1 << 16)
    await stage.until(lambda: stage.context.buffer_budget.used > 500_000, "it waits")
    client.reader._transport.resume_reading()
    assert await client.read_statuses(1) == [200]
    await stage.until(lambda: stage.context.buffer_budget.used == 0, "it is read")


async def test_a_damaged_record_ends_the_connection_quietly(stage, make_client, caplog) -> None:
    for place in (0, 3, 10, -1):
        client = await make_client(stage.gateway.port)
        record = bytearray(client.encrypt(build(ASK)))
        record[place] ^= 0x55
        await client.send(bytes(record) + b"\0" * 20_000, 1 << 16)
        with suppress(ConnectionResetError):
            while await asyncio.wait_for(client.reader.read(1 << 16), 30):
                pass
    await stage.until(lambda: not stage.context.clients, "all are closed")
    assert not stage.engines["x"].requests
    assert not caplog.records


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\x80\x01\x02\x00\x00",  # 128 KiB, which OpenSSL would allocate
        b"\x16\x03\x01\x00\x01\x01\x16\x03\x01",
        b"GET / HTT",
        b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00",  # SSL 2
    ],
)
async def test_what_begins_no_handshake_of_usual_length_takes_no_memory(stage, sent) -> None:
    client = await stage.connect()
    for place in range(len(sent)):
        client.writer.write(sent[place : place + 1])
        await asyncio.sleep(0)
    with suppress(ConnectionResetError):
        assert await client.is_closed()
    await stage.until(lambda: not stage.context.clients, "it is forgotten")


EDITS = st.tuples(
    st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "repeat"]), st.binary(max_size=40)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(EDITS, max_size=4),
    handshakes=st.booleans(),
    ends=st.sampled_from(["eof", "abort", "wait"]),
    size=st.sampled_from([1, 9, 5_000]),
)
async def test_no_bytes_leave_a_fault_or_a_trace(
    stage, make_client, caplog, edits, handshakes: bool, ends: str, size: int
) -> None:
    """Edited hellos, and edited records after a handshake, whole or in small pieces."""
    if handshakes:
        client = await make_client(stage.gateway.port)
        sent = client.encrypt(build(ASK), 50) + client.encrypt_end()
    else:
        client = TlsClient(make_client.trust)
        client.reader, client.writer = await asyncio.open_connection(
            "127.0.0.1", stage.gateway.port
        )
        with suppress(ssl.SSLWantReadError):
            client.tls.do_handshake()
        sent = client._outgoing.read()
    for place, how, some in edits:
        at = int(place * len(sent))
        if how == "flip":
            sent = sent[:at] + bytes([sent[at] ^ 0x41] if at < len(sent) else []) + sent[at + 1 :]
        elif how == "cut":
            sent = sent[:at]
        else:
            sent = sent[:at] + (some if how == "insert" else sent[:at]) + sent[at:]
    with suppress(OSError):
        await client.send(sent, size)
        if ends == "eof":
            client.writer.write_eof()
    if ends == "wait":
        await asyncio.sleep(0.01)
    client.close()
    context = stage.context
    await stage.until(lambda: not context.clients, "it is forgotten")
    await stage.until_idle()
    assert len(context.handshake_limiter) == len(context.client_limiter) == 0
    assert context.buffer_budget.connection_bytes == context.buffer_budget.used == 0
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("bytes_sent", [0, 1, 50])
async def test_a_handshake_has_a_deadline(stage, files: Files, monkeypatch, bytes_sent) -> None:
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.3)
    client = TlsClient(files.trust())
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.do_handshake()
    raw = await stage.connect()
    raw.writer.write(client._outgoing.read()[:bytes_sent])
    assert await raw.is_closed()
    await stage.until(lambda: not stage.context.clients, "it is forgotten")
    assert len(stage.context.handshake_limiter) == len(stage.context.client_limiter) == 0


@pytest.fixture
async def small_stage(make_stage, files: Files):
    """A gateway with TLS and a quarter of 4 MiB for handshakes."""
    return await make_stage(
        {"x": "mixed"},
        tls_certificate=files.certificate,
        tls_key=files.key,
        max_buffered_bytes=4 << 20,
        max_body_bytes=1 << 20,
    )


async def test_handshakes_have_a_share_of_the_memory_and_one_address_not_all_of_it(
    small_stage, make_client
) -> None:
    stage = small_stage
    fits = (1 << 20) // HANDSHAKE_BYTES
    for _ in range(3 * fits):
        (await stage.connect()).writer.write(FIRST_BYTES)
    await asyncio.sleep(0.2)
    assert len(stage.context.handshake_limiter) <= fits
    context = stage.context
    assert context.buffer_budget.connection_bytes <= fits * HANDSHAKE_BYTES
    other = await make_client(stage.gateway.port)
    await other.send(other.encrypt(build(ASK)), 1 << 16)
    assert await other.read_statuses(1) == [200]


async def test_handshakes_of_a_client_with_credit_are_not_closed_for_others(small_stage) -> None:
    """Though its address has most of them."""
    stage = small_stage
    context, fits = stage.context, (1 << 20) // HANDSHAKE_BYTES
    for _ in range(3):
        context.address_debts.add("127.0.0.1", -SETTLED)
    own, others = [await stage.connect() for _ in range(3)], []
    for client in own[:2]:
        client.writer.write(FIRST_BYTES)

    def list_kept() -> set[TlsConnection]:
        return {client for client in context.clients if client.is_expected()}

    await stage.until(lambda: len(list_kept()) == 2, "they have begun")
    known = list_kept()
    for number in range(3 * fits):
        local = f"127.0.1.{number + 1}", 0
        others.append(
            await asyncio.open_connection("127.0.0.1", stage.gateway.port, local_addr=local)
        )
        others[-1][1].write(FIRST_BYTES)
    await asyncio.sleep(0.2)
    own[2].writer.write(FIRST_BYTES)
    await stage.until(lambda: len(list_kept()) == 3, "others are closed for it")
    assert known <= context.clients
    assert len(context.handshake_limiter) <= fits
    for _, writer in others:
        writer.transport.abort()


async def test_clients_that_connect_at_once_are_all_served(small_stage, make_client) -> None:
    """Their handshakes wait for their turns before they take memory."""
    stage = small_stage
    num = 5 * ((1 << 20) // HANDSHAKE_BYTES)
    async with asyncio.timeout(30):
        await asyncio.gather(*(make_client(stage.gateway.port) for _ in range(num)))
    await stage.until(lambda: not len(stage.context.handshake_limiter), "they are over")


async def test_first_messages_that_arrive_at_once_are_not_handled_at_once(
    stage, files: Files, monkeypatch
) -> None:
    """Of clients that have gone meanwhile none is."""
    began = []
    begin = TlsConnection._begin
    monkeypatch.setattr(TlsConnection, "_begin", lambda self: (began.append(self), begin(self))[1])
    hello = TlsClient(files.trust())
    with pytest.raises(ssl.SSLWantReadError):
        hello.tls.do_handshake()
    sent = hello._outgoing.read()
    clients = [await stage.connect() for _ in range(200)]
    for client in clients:
        client.writer.write(sent)
    await stage.until(lambda: began, "the first one is handled")
    assert len(began) < 100
    for client in clients:
        client.close()
    await stage.until(lambda: not stage.context.clients, "they have gone")
    await stage.until(lambda: not stage.context.handshake_turns._waiting, "no turn is left")
    assert len(began) < 200


async def test_a_completion_settles_the_handshake_of_its_connection_and_a_page_does_not(
    stage, make_client
) -> None:
    debts = stage.context.address_debts
    client = await make_client(stage.gateway.port)
    await client.send(client.encrypt(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n"), 1 << 16)
    assert await client.read_statuses(1) == [200]
    (debt,) = debts._debts.values()
    assert debt > 0
    for _ in range(2):
        await client.send(client.encrypt(build(ASK)), 1 << 16)
        assert await client.read_statuses(1) == [200]
        settled = debt + 1 - SETTLED
        assert debts.get("127.0.0.1") == settled, "once for a connection, with the turn it took"


async def test_a_client_that_may_send_a_second_first_message_counts_with_its_length(
    stage, files: Files
) -> None:
    """Its key share and one of its groups are unknown, so it is sent a HelloRetryRequest."""
    client = TlsClient(files.trust())
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.do_handshake()
    sent = bytearray(client._outgoing.read())
    for begin, group in (
        (b"\x00\x0a\x00", b"\x00\x1e"),
        (b"\x00\x33\x00\x26\x00\x24", b"\x00\x1d"),
    ):
        place = sent.index(group, sent.index(begin))
        sent[place : place + 2] = b"\x99\x99"
    raw = await stage.connect()
    raw.writer.write(sent)
    limiter = stage.context.handshake_limiter
    await stage.until(lambda: limiter._bytes == RETRY_BYTES, "it counts")
    raw.close()
    await stage.until(lambda: not limiter._bytes, "it has gone")


async def test_clients_count_with_the_memory_of_tls(stage, make_client) -> None:
    budget = stage.context.buffer_budget
    plain = await stage.connect()
    await stage.until(lambda: budget.connection_bytes == CONNECTION_BYTES, "it is silent")
    client = await make_client(stage.gateway.port)
    await stage.until(lambda: budget.connection_bytes == CONNECTION_BYTES + TLS_BYTES, "it is one")
    for each in (plain, client):
        each.close()
    await stage.until(lambda: budget.connection_bytes == 0, "both have gone")


@pytest.fixture
async def process(files: Files) -> AsyncIterator[tuple[int, int]]:
    """A gateway process with TLS: its port, and its id."""
    port = find_free_port()
    command = [sys.executable, "-m", "cleave.gateway.main", "--agents", "127.0.0.1:1"]
    command += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    gateway = subprocess.Popen(  # noqa: ASYNC220 - it is only started
        [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)
        yield port, gateway.pid
    finally:
        gateway.kill()
        gateway.wait()


def read_resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) << 10


@pytest.mark.interpreted
async def test_a_connection_takes_no_more_memory_than_it_counts(process, make_client) -> None:
    """Each has sent a head of 60 KB, and one in two a part of a record besides."""
    port, pid = process
    count = 200
    head = b"GET /nowhere HTTP/1.1\r\nHost: g\r\nA: " + b"x" * 60_000 + b"\r\n\r\n"

    async def connect(number: int) -> TlsClient:
        client = await make_client(port)
        await client.send(client.encrypt(head), 1 << 16)
        assert await client.read_statuses(1) == [404]
        if number % 2:
            await client.send(client.encrypt(b"y" * 16_000)[:15_000], 1 << 16)
        return client

    for number in range(20):
        await connect(number)
    before = read_resident(pid)
    for number in range(count):
        await connect(number)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    await asyncio.sleep(0.3)
    each = (read_resident(pid) - before) / count
    assert each <= TLS_BYTES + CONNECTION_BYTES, f"{each / 1024:.1f} KiB"
    for _, writer in silent:
        writer.close()


CUTS = st.lists(st.integers(1, 3_000), max_size=30)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=CUTS, records=st.integers(1, 2_000), prompt=st.integers(0, 30_000))
async def test_any_records_in_any_pieces_are_the_same_request(
    stage, make_client, sizes: list[int], records: int, prompt: int
) -> None:
    client = await make_client(stage.gateway.port)
    encrypted = client.encrypt(build(ASK | {"prompt": "p" * prompt}), max(records, 20))
    for size in sizes:
        await client.send(encrypted[:size], 1 << 16)
        encrypted = encrypted[size:]
    await client.send(encrypted, 1 << 16)
    assert await client.read_statuses(1) == [200]
    assert stage.engines["x"].requests[-1].body["prompt"] == "p" * prompt
