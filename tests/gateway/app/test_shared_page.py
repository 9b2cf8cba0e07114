"""Pages that grow with the fleet are built in slices, once for all who wait."""

import asyncio
import time

import pytest

from cleave.gateway.app.shared_page import BuiltPage, PageRequest, SharedPage
from cleave.time_slices import SliceQueue, Steps

NUM_STEPS = 200


class Builder:
    """Builds pages that contain their number, slowly."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.begun = 0

    def build(self) -> Steps[BuiltPage]:
        self.begun += 1
        number = self.begun
        for _ in range(self.steps):
            until = time.monotonic() + 0.0001
            while time.monotonic() < until:
                pass
            yield
        return BuiltPage(200, b"", [b"%d" % number])


class Client:
    def __init__(self) -> None:
        self.pages: list[bytes] = []
        self.drops = 0
        self.request = PageRequest(lambda page: self.pages.append(page.body[0]), self.drop)

    def drop(self) -> None:
        self.drops += 1


async def until(done) -> None:
    for _ in range(20_000):
        if done():
            return
        await asyncio.sleep(0.001)
    pytest.fail("not within 20 s")


async def test_a_small_page_is_sent_at_once() -> None:
    client = Client()
    SharedPage(SliceQueue(0.5, time.monotonic), Builder(0).build).request(client.request)
    assert client.pages == [b"1"]


async def test_clients_that_come_while_a_page_is_built_share_the_next_one() -> None:
    builder, clients = Builder(NUM_STEPS), [Client() for _ in range(20)]
    page = SharedPage(SliceQueue(0.5, time.monotonic), builder.build)
    page.request(clients[0].request)
    assert builder.begun == 1
    for client in clients[1:]:
        page.request(client.request)
    await until(lambda: all(client.pages for client in clients))
    assert clients[0].pages == [b"1"]
    assert {client.pages[0] for client in clients[1:]} == {b"2"}
    assert builder.begun == 2


async def test_a_client_that_leaves_gets_nothing_and_the_others_do() -> None:
    first, second = Client(), Client()
    page = SharedPage(SliceQueue(0.5, time.monotonic), Builder(NUM_STEPS).build)
    for client in (first, second):
        page.request(client.request)
    first.request.cancel()
    await until(lambda: bool(second.pages))
    assert first.pages == []


async def test_a_page_that_cannot_be_built_ends_its_connections_and_the_next_is_tried() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    def fail() -> Steps[BuiltPage]:
        yield from Builder(NUM_STEPS).build()
        raise ValueError("broken")

    page, clients = SharedPage(SliceQueue(0.5, time.monotonic), fail), [Client() for _ in range(2)]
    page.request(clients[0].request)
    await until(lambda: clients[0].drops == 1)
    page.request(clients[1].request)
    await until(lambda: clients[1].drops == 1)
