"""Every way that bytes can take, with both ends in this process."""

import concurrent.futures
import os
import socket
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy  # noqa: E402
from cleave_worker.transfer.transport import BandwidthMeter, LinkError, Transport  # noqa: E402
from cleave_worker.transfer.transports import shared_memory, two_sided  # noqa: E402
from cleave_worker.transfer.transports.shared_memory import (  # noqa: E402
    SharedMemoryLink,
    SharedRegion,
    share_memory,
)

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


def met(
    pool: concurrent.futures.ThreadPoolExecutor, one: Memory, other: Memory
) -> tuple[two_sided.TwoSidedLink, two_sided.TwoSidedLink]:
    meeting = two_sided.Rendezvous(HOST, BOUND_S)
    entering = pool.submit(meeting.create_link, one, Transport.GLOO, HOST, BOUND_S)
    joined = two_sided.join_rendezvous(other, Transport.GLOO, (HOST, meeting.port), HOST, BOUND_S)
    return entering.result(BOUND_S), joined


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


def test_a_rendezvous_listens_on_its_address_only() -> None:
    meeting = two_sided.Rendezvous(HOST, BOUND_S)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", meeting.port), 2).close()
    socket.create_connection((HOST, meeting.port), 2).close()


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
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    source, target = random_memory(), empty_memory()
    sender, receiver = met(pool, source, target)
    owner_ranges = [ByteRange(0, 5, 10 << 20), ByteRange(0, 15 << 20, 3), ByteRange(0, 1, 2)]
    here = [ByteRange(0, 7, 5), ByteRange(0, 100, 10 << 20)]
    for _ in range(2):
        sending = pool.submit(sender.send, owner_ranges, BOUND_S)
        receiver.receive(here, BOUND_S)
        sending.result(BOUND_S)
    sent = torch.cat([source.view(span) for span in owner_ranges])
    assert torch.equal(torch.cat([target.view(span) for span in here]), sent)


def test_groups_of_different_pairs_do_not_wait_for_each_other(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    source, target = random_memory(), empty_memory()
    late, idle = met(pool, source, target)
    waiting = pool.submit(idle.receive, [ByteRange(0, 0, 10)], BOUND_S)
    sender, receiver = met(pool, source, target)
    sending = pool.submit(sender.send, [ByteRange(0, 50, 10)], BOUND_S)
    receiver.receive([ByteRange(0, 50, 10)], BOUND_S)
    sending.result(BOUND_S)
    assert not waiting.done()
    sender.close()
    late.send([ByteRange(0, 0, 10)], BOUND_S)
    waiting.result(BOUND_S)


def test_a_peer_that_sends_too_late_is_an_error_and_touches_nothing_any_more(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    source, target = random_memory(), empty_memory()
    sender, receiver = met(pool, source, target)
    with pytest.raises(LinkError, match="receiving failed"):
        receiver.receive([ByteRange(0, 0, 100)], 0.2)
    with pytest.raises(LinkError):
        sender.send([ByteRange(0, 0, SIZE)], BOUND_S)
    assert not target.regions[0].any()


def test_less_than_expected_is_an_error(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    sender, receiver = met(pool, random_memory(), target := empty_memory())
    sending = pool.submit(sender.send, [ByteRange(0, 0, 50)], BOUND_S)
    with pytest.raises(LinkError):
        receiver.receive([ByteRange(0, 0, 9 << 20)], 1.0)
    assert not target.regions[0].any()
    sender.close()
    sending.exception(BOUND_S)


def test_a_missing_peer_at_the_rendezvous_is_an_error_within_the_bound() -> None:
    meeting = two_sided.Rendezvous(HOST, 0.5)
    with pytest.raises(LinkError, match="no gloo group"):
        meeting.create_link(empty_memory(), Transport.GLOO, HOST, 0.5)


def test_only_transfers_that_end_well_are_measured() -> None:
    meter = BandwidthMeter()
    assert meter.bytes_per_s == 0
    with meter.measure(1000):
        pass
    with pytest.raises(LinkError), meter.measure(9000):
        raise LinkError("broken")
    assert meter.num_bytes == 1000
    assert meter.bytes_per_s > 0
