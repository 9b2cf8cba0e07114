"""What the operator makes of what the gateways say."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from cleave.controller.instances import ask, count_requests, merge, summarize_kv_paths
from cleave.rpc.fleet_page import FleetPage, Instance, KvPath

Serve = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a gateway that answers with this body, or never (status 0); returns its URL."""
    servers: list[asyncio.Server] = []
    served: set[asyncio.Task[None] | None] = set()

    async def start(body: bytes, status: int = 200) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.add(asyncio.current_task())
            asked = await reader.readuntil(b"\r\n\r\n")
            assert asked.startswith(b"GET /fleet HTTP/1.1\r\n")
            head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
            if status:
                writer.write(head + body)
                await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
    await asyncio.gather(*filter(None, served))
    await asyncio.sleep(0)


def page(*instances: Instance) -> bytes:
    return msgspec.json.encode(FleetPage(instances))


async def test_what_the_replicas_say_becomes_one_view(serve: Serve) -> None:
    one = Instance("d-0", contact="heard", num_running=3, report_age_s=0.5, requests_in_flight=2)
    two = Instance("d-0", contact="heard", num_running=4, report_age_s=0.1, requests_in_flight=1)
    urls = [await serve(page(one)), await serve(page(two, Instance("p-0")))]
    told = await ask(urls)
    assert list(told) == ["d-0", "p-0"]
    assert (told["d-0"].num_running, told["d-0"].requests_in_flight) == (4, 3)


async def test_gateways_that_say_nothing_useful_are_as_good_as_none(serve: Serve) -> None:
    urls = [
        "http://127.0.0.1:1",
        await serve(b"", 0),
        await serve(b"{"),
        await serve(b'{"instances": [{}]}'),
        await serve(b'{"instances": 7}'),
        await serve(page(Instance("x")), 503),
        await serve(page(Instance("p-0"))),
    ]
    assert list(await ask(urls, timeout_s=0.5)) == ["p-0"]
    assert await ask(urls[:5], timeout_s=0.5) == {}
    assert await ask([]) == {}


async def test_fields_that_are_new_or_no_longer_sent_do_no_harm(serve: Serve) -> None:
    url = await serve(b'{"instances": [{"name": "p-0", "colour": "red"}], "more": 1}')
    assert await ask([url]) == {"p-0": Instance("p-0")}


def test_a_gateway_that_has_lost_an_agent_is_believed_last() -> None:
    lost = Instance("d-0", contact="connection lost", state="ready", report_age_s=0.0)
    heard = Instance("d-0", contact="heard", state="draining", report_age_s=1.0)
    for views in ((lost, heard), (heard, lost)):
        assert merge(FleetPage((view,)) for view in views)["d-0"].state == "draining"


def test_what_a_gateway_has_just_sent_counts_before_the_engine_tells_of_it() -> None:
    assert count_requests(Instance("d", num_running=2, num_waiting=3)) == 5
    assert count_requests(Instance("d", num_running=1, requests_in_flight=4)) == 4
    assert count_requests(Instance("d")) == 0


FAST = KvPath(verified=True, transport="nixl over rdma", bytes_per_s=24e9, transfer_ms=8.0)
SLOW = KvPath(verified=True, transport="nixl over tcp", bytes_per_s=1.234e9, transfer_ms=40.0)
UNTOLD = KvPath(verified=True, transport="nixl", transfer_ms=8.4)


@pytest.mark.parametrize(
    ("paths", "verified", "message"),
    [
        ([], 0, "no gateway knows an instance yet"),
        ([FAST], 1, "nixl over rdma, 24 GB/s"),
        ([FAST, SLOW, UNTOLD], 3, "nixl over tcp, 1.23 GB/s (the slowest of 3)"),
        ([UNTOLD], 1, "nixl, 8 ms to the first token"),
        (
            [FAST, KvPath(detail="KV test with p-0 failed: other tokens"), KvPath()],
            1,
            "2 of 3 instances are not verified: i1: KV test with p-0 failed: other tokens",
        ),
    ],
)
def test_the_kv_paths_become_one_sentence(paths: list[KvPath], verified: int, message: str) -> None:
    told = summarize_kv_paths(Instance(f"i{n}", kv_path=path) for n, path in enumerate(paths))
    assert (told.verified, told.total, told.message) == (verified, len(paths), message)


def test_an_instance_that_has_not_been_tested_yet_says_what_it_does() -> None:
    told = summarize_kv_paths([Instance("p-0", state="starting", reason="engine starts")])
    assert told.message == "1 of 1 instances are not verified: p-0: engine starts"
