"""Which rank reads what from which: every byte of every rank's KV, once, for any two shapes."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import (  # noqa: E402
    LayerRegion,
    Memory,
    list_ranges,
    plan_copies,
    register_tensors,
)
from cleave_worker.transfer.sharding import (  # noqa: E402
    ParallelShape,
    ShardPart,
    ShardSource,
    ShardSpec,
    find_sources,
    slice_layers,
)

BLOCKS, TOKENS, STATE = 4, 3, 5
LAYERS = 5


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's KV, layer by layer [block, head, token, state] as vLLM's LBHNC has it."""

    share: ShardSpec
    layers: list[torch.Tensor]
    memory: Memory
    planes: list[LayerRegion]

    def cut(self, part: ShardPart, num_kv_heads: int) -> tuple[LayerRegion, ...]:
        return slice_layers(self.planes, self.share, part, num_kv_heads)


def rank_of(shape: ParallelShape, number: int, whole: torch.Tensor, packed: bool) -> Rank:
    """What a rank holds of the model's KV [layer, block, head, token, state]; `packed`: BLHNC."""
    layers = tuple(layer for layer in range(LAYERS) if layer in shape.get_layer_range(number))
    heads = shape.get_head_range(number, whole.shape[2])
    own = whole[list(layers), :, heads.start : heads.stop].clone()
    if packed:
        own = own.transpose(0, 1).contiguous().transpose(0, 1)
    memory, planes = register_tensors(own.unbind(0), BLOCKS)
    return Rank(ShardSpec(shape, number, layers), list(own.unbind(0)), memory, planes)


@st.composite
def shapes(draw: st.DrawFn, num_kv_heads: int) -> ParallelShape:
    sizes = [n for n in range(1, 9) if num_kv_heads % n == 0 or n % num_kv_heads == 0]
    later = draw(st.sets(st.integers(1, LAYERS - 1), max_size=3))
    return ParallelShape(draw(st.sampled_from(sizes)), (0, *sorted(later)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, ParallelShape, ParallelShape]:
    """KV heads (1: also MLA), and the shapes of a reading and an owning engine."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return heads, draw(shapes(heads)), draw(shapes(heads))


@settings(deadline=None)
@given(
    pair=pairs(),
    here=st.permutations(range(BLOCKS)),
    count=st.integers(1, BLOCKS),
    packed=st.tuples(st.booleans(), st.booleans()),
)
def test_every_rank_gets_all_that_it_should_hold_and_each_byte_once(
    pair: tuple[int, ParallelShape, ParallelShape],
    here: list[int],
    count: int,
    packed: tuple[bool, bool],
) -> None:
    heads, ours, theirs = pair
    whole = torch.randint(1, 1 << 30, (LAYERS, BLOCKS, heads, TOKENS, STATE), dtype=torch.int32)
    owners = [rank_of(theirs, rank, whole, packed[0]) for rank in range(theirs.num_ranks)]
    owner_blocks, filled = list(range(count)), here[:count]
    for number in range(ours.num_ranks):
        reader = rank_of(ours, number, torch.zeros_like(whole), packed[1])
        touched: Counter[tuple[int, int]] = Counter()
        for source in find_sources(ours, number, theirs, heads):
            if source.part is None:
                continue
            owner = owners[source.rank]
            owner_regions = owner.cut(source.part, heads)
            own = reader.cut(source.part, heads)
            copies = list(plan_copies(owner_regions, owner_blocks, own, filled))
            reader.memory.copy_from(owner.memory, ((to, come) for come, to in copies))
            for _, to in copies:
                touched.update((to.region, at) for at in range(to.offset, to.offset + to.length))
            assert_same_order(owner, owner_regions, owner_blocks, reader, own, filled)
        assert set(touched.values()) == {1}
        expected = rank_of(ours, number, whole, packed[1])
        for got, should in zip(reader.layers, expected.layers, strict=True):
            for block in range(count):
                assert torch.equal(got[filled[block]], should[owner_blocks[block]])
            assert not got[list(set(range(BLOCKS)) - set(filled))].any(), "no other block"
        assert len(touched) == sum(layer[filled].nbytes for layer in expected.layers)


def assert_same_order(
    owner: Rank,
    source: tuple[LayerRegion, ...],
    expected: list[int],
    reader: Rank,
    own: tuple[LayerRegion, ...],
    filled: list[int],
) -> None:
    """What a two-sided link sends is what is received, byte for byte in this order."""
    sent = torch.cat([owner.memory.view(span) for span in list_ranges(source, expected)])
    assert torch.equal(sent, torch.cat([reader.memory.view(s) for s in list_ranges(own, filled)]))


@given(pair=pairs())
def test_every_owner_hears_of_the_end_from_as_many_as_it_waits_for(
    pair: tuple[int, ParallelShape, ParallelShape],
) -> None:
    heads, ours, theirs = pair
    turned = [s for rank in range(ours.num_ranks) for s in find_sources(ours, rank, theirs, heads)]
    for rank in range(theirs.num_ranks):
        mine = [source for source in turned if source.rank == rank]
        assert mine, "or its blocks would be kept until the lease ends"
        assert {source.num_consumers for source in mine} == {len(mine)}


@given(pair=pairs())
def test_of_an_engine_of_the_same_shape_each_rank_turns_to_its_own_number(
    pair: tuple[int, ParallelShape, ParallelShape],
) -> None:
    heads, shape, _ = pair
    for rank in range(shape.num_ranks):
        (source,) = find_sources(shape, rank, shape, heads)
        assert (source.rank, source.num_consumers) == (rank, 1)
        assert source.part


def parts(
    ours: ParallelShape, rank: int, theirs: ParallelShape, heads: int
) -> list[tuple[int, object, int]]:
    return [(s.rank, s.part, s.num_consumers) for s in find_sources(ours, rank, theirs, heads)]


def test_one_rank_takes_its_heads_from_two() -> None:
    end = ParallelShape().get_layer_range(0).stop
    assert parts(ParallelShape(1), 0, ParallelShape(2), 8) == [
        (0, ShardPart(0, end, 0, 4), 1),
        (1, ShardPart(0, end, 4, 8), 1),
    ]


def test_two_ranks_share_what_one_holds() -> None:
    end = ParallelShape().get_layer_range(0).stop
    assert parts(ParallelShape(2), 1, ParallelShape(1), 8) == [(0, ShardPart(0, end, 4, 8), 2)]


def test_equal_stages_turn_to_each_other_and_unequal_ones_by_layers() -> None:
    end = ParallelShape().get_layer_range(0).stop
    two = ParallelShape(1, (0, 3))
    assert parts(two, 1, two, 8) == [(1, ShardPart(3, end, 0, 8), 1)]
    assert parts(ParallelShape(1, (0, 2)), 1, two, 8) == [
        (0, ShardPart(2, 3, 0, 8), 2),
        (1, ShardPart(3, end, 0, 8), 1),
    ]


def test_one_of_two_copies_is_read_and_the_other_is_declined() -> None:
    end = ParallelShape().get_layer_range(0).stop
    assert find_sources(ParallelShape(1), 0, ParallelShape(2), 1) == (
        ShardSource(0, ShardPart(0, end, 0, 1), 1),
        ShardSource(1, None, 1),
    )
    assert [parts(ParallelShape(4), rank, ParallelShape(2), 1)[0][0] for rank in range(4)] == [
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("shape", "heads", "fault"),
    [
        (ParallelShape(4, (0, 2)), 8, ""),
        (ParallelShape(8), 2, ""),
        (ParallelShape(3), 8, "8 KV heads cannot be sharded over 3 tensor parallel ranks"),
        (ParallelShape(0), 8, "cannot be sharded"),
        (ParallelShape(1), 0, "cannot be sharded"),
        (ParallelShape(1, ()), 8, "must ascend from 0"),
        (ParallelShape(1, (1, 2)), 8, "must ascend from 0"),
        (ParallelShape(1, (0, 2, 2)), 8, "must ascend from 0"),
    ],
)
def test_shapes_that_no_engine_has_are_reported(
    shape: ParallelShape, heads: int, fault: str
) -> None:
    message = shape.find_fault(heads)
    assert fault in message
    assert bool(message) is bool(fault)


def test_what_a_rank_does_not_hold_cannot_be_cut_from_it() -> None:
    planes = [LayerRegion(0, 0, 64, 64)] * 2
    share = ShardSpec(ParallelShape(2, (0, 2)), 1, (0, 1))
    assert slice_layers(planes, share, ShardPart(1, 9, 5, 7), 8) == (LayerRegion(0, 16, 64, 32),)
    for part in (
        ShardPart(0, 9, 3, 5),
        ShardPart(0, 9, 6, 9),
        ShardPart(2, 9, 4, 8),
        ShardPart(0, 9, 5, 5),
    ):
        with pytest.raises(ValueError, match="rank 1 has"):
            slice_layers(planes, share, part, 8)
    for layers in ((0,), (0, 2)):
        with pytest.raises(ValueError, match="cannot have layers"):
            slice_layers(planes, ShardSpec(share.shape, 1, layers), ShardPart(0, 1, 4, 8), 8)
