"""Every way that bytes can take, with both ends in this process."""

import concurrent.futures
import os
from collections.abc import Callable, Iterator

import psutil
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import protocol  # noqa: E402
from cleave_worker.transfer.authentication import make_nonce  # noqa: E402
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy  # noqa: E402
from cleave_worker.transfer.transport import BandwidthMeter, LinkError, Transport  # noqa: E402
from cleave_worker.transfer.transports import shared_memory, two_sided  # noqa: E402
from cleave_worker.transfer.transports.shared_memory import (  # noqa: E402
    SharedMemoryLink,
    SharedRegion,
    share_memory,
)

from tests.support.kv_connections import ConnectedPairs  # noqa: E402

Meet = Callable[[Memory, Memory], tuple[two_sided.TwoSidedLink, two_sided.TwoSidedLink]]
KEY = "key of the producer"
HOST = "127.0.0.1"
SIZE = 20 << 20
BOUND_S = 60.0


def random_memory() -> Memory:
    return Memory([torch.randint(0, 255, (SIZE,), dtype=torch.uint8)])


def empty_memory() -> Memory:
    return Memory([torch.zeros(SIZE, dtype=torch.uint8)])


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def met(pool: concurrent.futures.ThreadPoolExecutor, pairs: ConnectedPairs) -> Meet:
    """Makes a link between two memories."""

    def meet(one: Memory, other: Memory) -> tuple[two_sided.TwoSidedLink, two_sided.TwoSidedLink]:
        producer, consumer = make_rendezvous(pairs, KEY, KEY)
        entering = pool.submit(producer.create_producer_link, one, Transport.GLOO, HOST)
        joined = consumer.create_consumer_link(other, Transport.GLOO, HOST)
        return entering.result(BOUND_S), joined

    return meet


def make_rendezvous(
    pairs: ConnectedPairs, producer_key: str, consumer_key: str, seconds: float = BOUND_S
) -> tuple[two_sided.Rendezvous, two_sided.Rendezvous]:
    accepted, connected = pairs.connect()
    nonce = make_nonce()
    return (
        two_sided.Rendezvous(accepted, nonce, producer_key, seconds),
        two_sided.Rendezvous(connected, nonce, consumer_key, seconds),
    )


def test_shared_memory_is_read_without_the_owner() -> None:
    theirs, ours = random_memory(), empty_memory()
    alias = theirs.regions[0][100:200]
    before = alias.clone()
    link = SharedMemoryLink(ours, share_memory(theirs))
    assert torch.equal(alias, before), "moving into shared memory keeps contents and views"
    link.read([RangeCopy(ByteRange(0, 100, 100), ByteRange(0, 0, 100))], BOUND_S)
    assert torch.equal(ours.regions[0][:100], before)
    with pytest.raises(LinkError, match="region"):
        link.read([RangeCopy(ByteRange(0, SIZE, 1), ByteRange(0, 0, 1))], BOUND_S)
    link.close()


def test_shared_memory_of_another_cannot_be_written() -> None:
    theirs = random_memory()
    region = share_memory(theirs)[0]
    opened: list[int] = []
    real = os.open

    def watched(path: str, flags: int) -> int:
        opened.append(flags)
        return real(path, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watched)
        mapping = shared_memory._map_region(region)
    assert opened == [os.O_RDONLY | os.O_CLOEXEC]
    with pytest.raises(TypeError):
        mapping[0] = 1
    mapping.close()


def test_a_link_listens_on_its_address_only_and_leaves_no_store_behind(met: Meet) -> None:
    before = list_listening()
    links = met(random_memory(), empty_memory())
    assert {address for address in list_listening() - before if address[0] != HOST} == set()
    for link in links:
        link.close()
    assert list_listening() <= before


def test_an_end_without_the_key_gets_no_link(
    pool: concurrent.futures.ThreadPoolExecutor, pairs: ConnectedPairs
) -> None:
    producer, consumer = make_rendezvous(pairs, KEY, "another")
    memory = random_memory()
    entering = pool.submit(producer.create_producer_link, memory, Transport.GLOO, HOST)
    with pytest.raises(LinkError, match="the peer of the link does not have the key"):
        consumer.create_consumer_link(empty_memory(), Transport.GLOO, HOST)
    with pytest.raises(LinkError, match="the peer of the link does not have the key"):
        entering.result(BOUND_S)


def list_listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens."""
    own = {connection.laddr for connection in psutil.Process().net_connections("tcp")
           if connection.status == psutil.CONN_LISTEN}  # fmt: skip
    return {(address.ip, address.port) for address in own}


def test_a_file_that_took_the_place_of_another_is_not_mapped() -> None:
    memory = random_memory()
    (region,) = share_memory(memory)
    other = SharedRegion(region.pid, region.fd, region.device, region.inode + 1, region.size)
    with pytest.raises(LinkError, match="another file"):
        SharedMemoryLink(empty_memory(), [other])


def test_a_process_that_is_gone_cannot_be_mapped() -> None:
    with pytest.raises(LinkError, match="cannot be mapped"):
        SharedMemoryLink(empty_memory(), [SharedRegion(2**22 - 1, 3, 0, 0, 10)])


def test_a_group_moves_scattered_spans_larger_than_a_piece(
    pool: concurrent.futures.ThreadPoolExecutor, met: Meet
) -> None:
    source, target = random_memory(), empty_memory()
    sender, receiver = met(source, target)
    owner_ranges = [ByteRange(0, 5, 10 << 20), ByteRange(0, 15 << 20, 3), ByteRange(0, 1, 2)]
    here = [ByteRange(0, 7, 5), ByteRange(0, 100, 10 << 20)]
    for _ in range(2):
        sending = pool.submit(sender.send, owner_ranges, BOUND_S)
        receiver.receive(here, BOUND_S)
        sending.result(BOUND_S)
    sent = torch.cat([source.view(span) for span in owner_ranges])
    assert torch.equal(torch.cat([target.view(span) for span in here]), sent)


def test_groups_of_different_pairs_do_not_wait_for_each_other(
    pool: concurrent.futures.ThreadPoolExecutor, met: Meet
) -> None:
    source, target = random_memory(), empty_memory()
    late, idle = met(source, target)
    waiting = pool.submit(idle.receive, [ByteRange(0, 0, 10)], BOUND_S)
    sender, receiver = met(source, target)
    sending = pool.submit(sender.send, [ByteRange(0, 50, 10)], BOUND_S)
    receiver.receive([ByteRange(0, 50, 10)], BOUND_S)
    sending.result(BOUND_S)
    assert not waiting.done()
    sender.close()
    late.send([ByteRange(0, 0, 10)], BOUND_S)
    waiting.result(BOUND_S)


def test_a_peer_that_sends_too_late_is_an_error_and_touches_nothing_any_more(met: Meet) -> None:
    source, target = random_memory(), empty_memory()
    sender, receiver = met(source, target)
    with pytest.raises(LinkError, match="receiving failed"):
        receiver.receive([ByteRange(0, 0, 100)], 0.2)
    with pytest.raises(LinkError):
        sender.send([ByteRange(0, 0, SIZE)], BOUND_S)
    assert not target.regions[0].any()


def test_less_than_expected_is_an_error(
    pool: concurrent.futures.ThreadPoolExecutor, met: Meet
) -> None:
    sender, receiver = met(random_memory(), target := empty_memory())
    sending = pool.submit(sender.send, [ByteRange(0, 0, 50)], BOUND_S)
    with pytest.raises(LinkError):
        receiver.receive([ByteRange(0, 0, 9 << 20)], 1.0)
    assert not target.regions[0].any()
    sender.close()
    sending.exception(BOUND_S)


def test_a_missing_peer_at_the_rendezvous_is_an_error_within_the_bound(
    pairs: ConnectedPairs,
) -> None:
    rendezvous, _silent = make_rendezvous(pairs, KEY, KEY, 0.5)
    with pytest.raises(LinkError, match="peer"):
        rendezvous.create_producer_link(empty_memory(), Transport.GLOO, HOST)


def test_a_peer_that_gives_up_a_link_is_heard_at_once(pairs: ConnectedPairs) -> None:
    accepted, connected = pairs.connect()
    request = protocol.RendezvousRequest(Transport.NCCL)
    connected.send(request, BOUND_S)
    rendezvous = two_sided.Rendezvous(accepted, make_nonce(), KEY, BOUND_S)
    with pytest.raises(LinkError, match="given up"):
        rendezvous.create_producer_link(empty_memory(), Transport.GLOO, HOST)
    assert accepted.receive(BOUND_S) == request, "the next request is not lost"


def test_only_transfers_that_end_well_are_measured() -> None:
    meter = BandwidthMeter()
    assert meter.bytes_per_s == 0
    with meter.measure(1000):
        pass
    with pytest.raises(LinkError), meter.measure(9000):
        raise LinkError("broken")
    assert meter.num_bytes == 1000
    assert meter.bytes_per_s > 0
