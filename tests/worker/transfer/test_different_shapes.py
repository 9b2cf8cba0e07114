"""Handoffs between engines of different shapes, every rank of the owner in a process of its own."""

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.client import KvClient, _build_request  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.rank_resolver import find_remote_ranks  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from tests.support.kv_server_process import LAYOUT, OwnerProcess, caches, register_kv  # noqa: E402

BOUND_S = 60.0
PROMPT = [5, 6, 7, 8]
OWNER_BLOCKS, HERE = [3, 4, 9], [10, 11, 2]
STAGES = (0, 2)
SHAPES = {
    "TP 2 to 1": (ParallelShape(2), ParallelShape(1)),
    "TP 1 to 2": (ParallelShape(1), ParallelShape(2)),
    "more ranks than heads": (ParallelShape(4), ParallelShape(2)),
    "fewer copies": (ParallelShape(2), ParallelShape(4)),
    "PP 2 to 2": (ParallelShape(1, STAGES), ParallelShape(1, STAGES)),
    "PP 2 to 2, cut elsewhere": (ParallelShape(1, STAGES), ParallelShape(1, (0, 1))),
    "PP 2 to TP 2": (ParallelShape(1, STAGES), ParallelShape(2)),
    "TP 2 to PP 2": (ParallelShape(2), ParallelShape(1, STAGES)),
}


class Owners:
    """An engine's ranks."""

    def __init__(self, shape: ParallelShape) -> None:
        self.shape = shape
        self.ranks = [OwnerProcess(shape=shape, rank=rank) for rank in range(shape.num_ranks)]
        self._freed: list[set[str]] = [set() for _ in self.ranks]
        self._numbers = itertools.count()

    def hold(self) -> Handoff:
        request_id = f"r{next(self._numbers)}"
        handed = [rank.hold(request_id, PROMPT, OWNER_BLOCKS) for rank in self.ranks]
        addresses = tuple(one.addresses[0] for one in handed)
        return msgspec.structs.replace(handed[0], addresses=addresses, shape=self.shape)

    def have_freed(self, handoff: Handoff) -> bool:
        """Whether all ranks have, or none; True or False."""
        for freed, rank in zip(self._freed, self.ranks, strict=True):
            freed.update(rank.command("freed")["freed"])
        (same,) = {handoff.request_id in freed for freed in self._freed}
        return same


class Readers:
    """The ranks of a decode engine, each with memory and links of its own."""

    def __init__(self, shape: ParallelShape, way: Transport) -> None:
        self.shape = shape
        self.tensors = [caches(0, shape, rank) for rank in range(shape.num_ranks)]
        self.ranks = [
            KvClient(register_kv("boot-d", one, shape, rank), [way], BOUND_S, check_bytes=True)
            for rank, one in enumerate(self.tensors)
        ]

    def pull(
        self, handoff: Handoff, ranks: Sequence[int] | None = None, first: int = 0
    ) -> list[Transport | RefusalReason]:
        """By rank, all side by side: the way, or why not."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
            started = [pool.submit(self._pull, rank, handoff, first) for rank in chosen]
            return [one.result(BOUND_S) for one in started]

    def _pull(self, rank: int, handoff: Handoff, first: int) -> Transport | RefusalReason:
        try:
            return self.ranks[rank].pull(handoff, handoff.prompt_digest, first, HERE[first:])
        except RefusedError as refused:
            return refused.reason

    def have_what_was_written(self) -> bool:
        return all(self.has_what_was_written(rank) for rank in range(len(self.ranks)))

    def has_what_was_written(self, rank: int) -> bool:
        """Everything of the requested blocks, and nothing of any other block."""
        expected, untouched = caches(1000, self.shape, rank), caches(0, self.shape, rank)
        for layer, own in zip(expected, untouched, strict=True):
            own[HERE] = layer[OWNER_BLOCKS]
        return all(map(torch.equal, self.tensors[rank], untouched))


@pytest.fixture(scope="module")
def owning() -> Iterator[Callable[[ParallelShape], Owners]]:
    """The same processes for every test: each has to load torch."""
    owners_by_shape: dict[ParallelShape, Owners] = {}

    def make(shape: ParallelShape) -> Owners:
        if shape not in owners_by_shape:
            owners_by_shape[shape] = Owners(shape)
        return owners_by_shape[shape]

    yield make
    for engine in owners_by_shape.values():
        for rank in engine.ranks:
            rank.end()


Own = Callable[[ParallelShape], Owners]


@pytest.fixture
def reading(way: Transport) -> Iterator[Callable[[ParallelShape], Readers]]:
    all_readers: list[Readers] = []

    def make(shape: ParallelShape) -> Readers:
        all_readers.append(Readers(shape, way))
        return all_readers[-1]

    yield make
    for one in all_readers:
        for rank in one.ranks:
            rank.close()


Make = Callable[[ParallelShape], Readers]


@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_gets_its_part_and_all_owners_are_free(
    owning: Own, reading: Make, way: Transport, name: str
) -> None:
    theirs, ours = SHAPES[name]
    owners, readers = owning(theirs), reading(ours)
    handoff = owners.hold()
    assert readers.pull(handoff) == [way] * ours.num_ranks
    assert readers.have_what_was_written()
    assert owners.have_freed(handoff)


def test_an_owner_keeps_its_blocks_until_the_last_rank_has_them(
    owning: Own, reading: Make, way: Transport
) -> None:
    owners, readers = owning(ParallelShape(1)), reading(ParallelShape(2))
    handoff = owners.hold()
    assert readers.pull(handoff, [1]) == [way]
    assert not owners.have_freed(handoff)
    assert readers.pull(handoff, [1]) == [RefusalReason.BUSY]
    assert readers.pull(handoff, [0]) == [way]
    assert readers.have_what_was_written()
    assert owners.have_freed(handoff)


def test_ranks_of_two_engines_never_share_a_hold(owning: Own, reading: Make) -> None:
    owners = owning(ParallelShape(1))
    one, other = reading(ParallelShape(2)), reading(ParallelShape(2))
    other.ranks[1].kv = replace(other.ranks[1].kv, boot_id="boot-e")
    handoff = owners.hold()
    one.pull(handoff, [0])
    assert other.pull(handoff, [1]) == [RefusalReason.BUSY]
    assert not owners.have_freed(handoff)


def test_one_rank_of_the_owner_that_is_lost_fails_the_whole_pull(
    owning: Own, reading: Make
) -> None:
    owners, readers = owning(ParallelShape(2)), reading(ParallelShape(1))
    assert readers.pull(without_the_second(owners.hold())) == [RefusalReason.PEER_LOST]


def without_the_second(handoff: Handoff) -> Handoff:
    dead = (handoff.addresses[0], ("127.0.0.1", 1))
    return msgspec.structs.replace(handoff, addresses=dead)


def test_a_rank_that_is_lost_while_it_reads_makes_void_what_the_others_read(
    owning: Own, reading: Make
) -> None:
    owners, readers = owning(ParallelShape(1)), reading(ParallelShape(2))
    handoff = owners.hold()
    (peer,) = find_remote_ranks(readers.ranks[0].kv, handoff)
    pair = readers.ranks[0]._get_connection(peer)
    pair._request_or_reconnect(_build_request(handoff, 0, HERE))
    pair.close()
    until(lambda: owners.have_freed(handoff))
    assert readers.pull(handoff, [1]) == [RefusalReason.NOT_HELD]


def test_a_declined_prompt_is_free_when_every_rank_has_declined(owning: Own, reading: Make) -> None:
    owners, readers = owning(ParallelShape(1)), reading(ParallelShape(2))
    handoff = owners.hold()
    readers.ranks[0].decline(handoff)
    assert not owners.have_freed(handoff)
    readers.ranks[1].decline(handoff)
    assert owners.have_freed(handoff)


WRONG: list[tuple[dict[str, object], RefusalReason]] = [
    ({"shape": ParallelShape(1)}, RefusalReason.LAYOUT),
    ({"shape": ParallelShape(3)}, RefusalReason.LAYOUT),
    ({"shape": ParallelShape(1, (0, 2))}, RefusalReason.LAYOUT),
    ({"shape": ParallelShape(1, (0, 0))}, RefusalReason.LAYOUT),
    ({"shape": ParallelShape(4)}, RefusalReason.LAYOUT),
]


def test_a_handoff_of_another_shape_than_the_owners_is_refused(
    owning: Own, reading: Make, way: Transport
) -> None:
    owners, readers = owning(ParallelShape(2)), reading(ParallelShape(1))
    handoff = owners.hold()
    swapped = tuple(reversed(handoff.addresses))
    for changed, reason in [*WRONG, ({"addresses": swapped}, RefusalReason.LAYOUT)]:
        assert readers.pull(msgspec.structs.replace(handoff, **changed)) == [reason]
    assert [one.tolist() for one in readers.tensors[0]] == [one.tolist() for one in caches(0)]
    assert readers.pull(handoff) == [way]
    assert readers.have_what_was_written()


def test_another_number_of_heads_or_layers_is_refused_at_the_greeting(
    owning: Own, reading: Make
) -> None:
    owners, readers = owning(ParallelShape(2)), reading(ParallelShape(1))
    registered = readers.ranks[0].kv
    for field, value in (("num_kv_heads", 4), ("num_layers", 9), ("block_size", 32)):
        other = msgspec.structs.replace(LAYOUT, **{field: value})
        readers.ranks[0].kv = replace(registered, layout=other)
        assert readers.pull(owners.hold()) == [RefusalReason.LAYOUT]


def test_heartbeats_reach_every_rank_of_the_owner(owning: Own, reading: Make) -> None:
    owners, readers = owning(ParallelShape(2)), reading(ParallelShape(1))
    handoff = owners.hold()
    assert readers.ranks[0].send_heartbeats([handoff]) == 0
    assert readers.ranks[0].send_heartbeats([without_the_second(handoff)]) == 1


def test_what_the_prefix_cache_has_is_not_pulled_from_any_rank(
    owning: Own, reading: Make, way: Transport
) -> None:
    owners, readers = owning(ParallelShape(2)), reading(ParallelShape(1))
    before = caches(0)
    assert readers.pull(owners.hold(), first=2) == [way]
    written = caches(1000)
    for own, old, new in zip(readers.tensors[0], before, written, strict=True):
        assert torch.equal(own[HERE[:2]], old[HERE[:2]])
        assert torch.equal(own[HERE[2]], new[OWNER_BLOCKS[2]])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
