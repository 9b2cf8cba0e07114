"""What is sent in one turn of the event loop."""

import asyncio
from collections.abc import Callable

from cleave.gateway.http.write_batcher import MAX_BATCH, WriteBatcher

Sent = list[tuple[str, bytes]]


class Wire(asyncio.Transport):
    """Notes what is written to it, in a list that several share."""

    def __init__(self, name: str, sent: Sent) -> None:
        super().__init__()
        self._name = name
        self._sent = sent
        self.cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._sent.append((self._name, bytes(data)))

    def is_closing(self) -> bool:
        return self.cut


def build() -> tuple[WriteBatcher, Sent, list[Callable[[], None]]]:
    later: list[Callable[[], None]] = []
    return WriteBatcher(later.append), [], later


def test_it_is_sent_in_order_once_the_turn_is_over() -> None:
    batcher, sent, later = build()
    a, b = Wire("a", sent), Wire("b", sent)
    for wire, data in ((a, b"1"), (b, b"2"), (a, b"3")):
        batcher.write(wire, data)
    assert (sent, len(later)) == ([], 1)
    later.pop()()
    assert sent == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    batcher.write(b, b"4")
    assert len(later) == 1, "the next turn is asked for anew"


def test_many_are_not_held_back_until_then() -> None:
    batcher, sent, later = build()
    wire = Wire("a", sent)
    for number in range(MAX_BATCH + 1):
        batcher.write(wire, b"%d" % number)
    assert [data for _, data in sent] == [b"%d" % number for number in range(MAX_BATCH)]
    for work in later:
        work()
    assert sent[-1] == ("a", b"%d" % MAX_BATCH)
    assert len(sent) == MAX_BATCH + 1, "what was sent is not sent again"


def test_what_is_for_a_connection_that_was_cut_is_dropped_and_nothing_else() -> None:
    batcher, sent, _ = build()
    gone, open_wire = Wire("gone", sent), Wire("there", sent)
    batcher.write(gone, b"1")
    batcher.write(open_wire, b"2")
    gone.cut = True
    batcher.flush()
    assert sent == [("there", b"2")]


async def test_a_fault_in_a_connection_keeps_nothing_from_others() -> None:
    class Failing(Wire):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise ValueError

        def abort(self) -> None:
            self.cut = True

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    batcher, sent, _ = build()
    failing = Failing("failing", sent)
    for wire in (failing, Wire("a", sent), failing):
        batcher.write(wire, b"1")
    batcher.flush()
    assert sent == [("a", b"1")]
    assert failing.cut


async def test_an_event_loop_ends_its_turn_by_itself() -> None:
    sent: Sent = []
    WriteBatcher().write(Wire("a", sent), b"1")
    assert not sent
    await asyncio.sleep(0)
    assert sent == [("a", b"1")]


async def test_an_answer_is_whole_when_its_connection_is_closed_after_it(single) -> None:
    for _ in range(3):
        client = await single.connect()
        body = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
        client.writer.write(client.build(body).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", 1))
        raw = await client.reader.read()
        assert raw.endswith(b"data: [DONE]\n\n")
