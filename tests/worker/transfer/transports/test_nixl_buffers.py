"""Buffers that transfers may still write to are not lent, in any order of events."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import Memory  # noqa: E402
from cleave_worker.transfer.transport import LinkError  # noqa: E402
from cleave_worker.transfer.transports import nixl_buffers  # noqa: E402
from cleave_worker.transfer.transports.nixl_agent import XferDescriptor, XferState  # noqa: E402
from cleave_worker.transfer.transports.nixl_buffers import StagingBuffer, StagingBuffers  # noqa: E402

MOST = 3
BOUND_S = 60.0


class FakeAgent:
    """Knows peers by metadata that are their names."""

    def __init__(self, *_: object, **__: object) -> None:
        self.known: set[str] = set()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.discard(name)

    def register(self, memory: Memory) -> list[XferDescriptor]:
        return [XferDescriptor(region.data_ptr(), region.numel(), 0) for region in memory.regions]


class FakeHandle:
    def __init__(self, state: XferState) -> None:
        self.state = state

    def poll(self) -> XferState:
        return self.state


@pytest.fixture(scope="module", autouse=True)
def _small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_buffers, "NixlAgent", FakeAgent)
        patch.setattr(nixl_buffers, "CHUNK_BYTES", 64)
        patch.setattr(nixl_buffers, "_MAX_BUFFERS", MOST)
        yield


def met(*names: str) -> tuple[StagingBuffers, FakeAgent]:
    buffers = StagingBuffers("boot-d/0/reader", torch.device("cpu"))
    for name in names:
        agent = buffers.add_remote_agent(name.encode(), name)
    assert isinstance(agent, FakeAgent)
    return buffers, agent


def now() -> float:
    return time.monotonic()


def test_a_buffer_whose_transfers_are_over_is_lent_again() -> None:
    buffers, _ = met("p")
    first = buffers.acquire("p", now())
    buffers.release(first, [FakeHandle(XferState.DONE)], "p")
    assert buffers.acquire("p", now()) is first


def test_what_is_under_way_keeps_its_buffer_and_its_peer_until_it_is_over() -> None:
    buffers, agent = met("p")
    lent, flight = buffers.acquire("p", now()), FakeHandle(XferState.IN_PROGRESS)
    buffers.release(lent, [flight, FakeHandle(XferState.DONE)], "p")
    buffers.remove_remote_agent("p")
    assert agent.known == {"p"}, "NIXL must not forget a peer from which bytes come"
    buffers.add_remote_agent(b"q", "q")
    other = buffers.acquire("q", now())
    assert other is not lent
    flight.state = XferState.DONE
    buffers.release(other, [], "q")
    assert agent.known == {"q"}
    assert lent in (buffers.acquire("q", now()), buffers.acquire("q", now()))


def test_a_buffer_of_which_nothing_is_known_is_never_lent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffers, agent = met("p")
    lent = buffers.acquire("p", now())
    flights = [FakeHandle(XferState.FAILED), FakeHandle(XferState.IN_PROGRESS)]
    buffers.release(lent, flights, "p")
    buffers.remove_remote_agent("p")
    assert agent.known == {"p"}
    flights[1].state = XferState.DONE
    buffers.add_remote_agent(b"q", "q")
    assert lent not in [buffers.acquire("q", now()) for _ in range(MOST - 1)]
    assert agent.known == {"q"}
    assert "1 of 3" in caplog.text
    with pytest.raises(LinkError, match="in time"):
        buffers.acquire("q", now())


def test_with_too_many_lost_nothing_is_lent_and_the_caller_does_not_wait() -> None:
    buffers, _ = met("p")
    for _ in range(MOST):
        buffers.release(buffers.acquire("p", now()), [FakeHandle(XferState.FAILED)], "p")
    with pytest.raises(LinkError, match="have not completed"):
        buffers.acquire("p", now() + BOUND_S)


def test_an_agent_of_another_name_is_refused_and_forgotten() -> None:
    buffers, agent = met("boot-p/0")
    with pytest.raises(LinkError, match="boot-before/0"):
        buffers.add_remote_agent(b"boot-before/0", "boot-p/0")
    assert agent.known == {"boot-p/0"}


def test_one_that_is_known_already_stays_known_when_it_is_not_the_one_meant() -> None:
    buffers, agent = met("p")
    with pytest.raises(LinkError):
        buffers.add_remote_agent(b"p", "q")
    assert agent.known == {"p"}


def test_an_unreferenced_reader_with_bytes_under_way_stays_alive() -> None:
    buffers, _ = met("p")
    flight = FakeHandle(XferState.IN_PROGRESS)
    buffers.release(buffers.acquire("p", now()), [flight], "p")
    assert buffers in nixl_buffers._pinned
    flight.state = XferState.DONE
    buffers.release(buffers.acquire("p", now()), [], "p")
    assert buffers not in nixl_buffers._pinned


def test_a_failing_agent_creation_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*args: object, **_: object) -> None:
        tried.append(args)
        raise LinkError("no card")

    monkeypatch.setattr(nixl_buffers, "NixlAgent", fail)
    buffers = StagingBuffers("boot-d/0/reader", torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(LinkError, match="no card"):
            buffers.add_remote_agent(b"p", "p")
    assert len(tried) == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lend", "give back", "end", "fail", "meet", "part"]), st.integers(0, 7)
    ),
    max_size=60,
)


@given(STEPS)
def test_in_any_order_of_events_no_buffer_is_lent_while_written(
    steps: list[tuple[str, int]],
) -> None:
    """Lent buffers have one owner and no writer; peers are known while in use."""
    buffers, agent = met("0")
    links, lent = ["0"], list[tuple[StagingBuffer, str]]()
    flights: list[tuple[StagingBuffer, str, FakeHandle]] = []
    for what, number in steps:
        match what:
            case "lend" if links:
                peer = links[number % len(links)]
                try:
                    buffer = buffers.acquire(peer, now())
                except LinkError:
                    continue
                assert all(buffer is not other for other, _ in lent)
                assert all(
                    buffer is not other or flight.state is XferState.DONE
                    for other, _, flight in flights
                )
                lent.append((buffer, peer))
            case "give back" if lent:
                buffer, peer = lent.pop(number % len(lent))
                states = (XferState.DONE, XferState.IN_PROGRESS, XferState.FAILED)
                begun = [FakeHandle(states[(number + at) % 3]) for at in range(number % 3)]
                flights += [(buffer, peer, flight) for flight in begun]
                buffers.release(buffer, begun, peer)
            case "end" | "fail" if flights:
                flight = flights[number % len(flights)][2]
                if flight.state is XferState.IN_PROGRESS:
                    flight.state = XferState.DONE if what == "end" else XferState.FAILED
            case "meet":
                buffers.add_remote_agent(str(number).encode(), str(number))
                links.append(str(number))
            case "part" if links:
                buffers.remove_remote_agent(links.pop(number % len(links)))
        used = {*links, *(peer for _, peer in lent)}
        used |= {peer for _, peer, flight in flights if flight.state is XferState.IN_PROGRESS}
        assert used <= agent.known
