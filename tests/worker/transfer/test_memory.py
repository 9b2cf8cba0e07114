"""Registered memory: regions, planes and the fewest copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import (  # noqa: E402
    ByteRange,
    LayerRegion,
    Memory,
    list_ranges,
    plan_copies,
    register_tensors,
)

PLANE = LayerRegion(region=0, offset=0, stride=8, block_bytes=8)


def test_layers_of_one_allocation_share_a_region() -> None:
    whole = torch.arange(2 * 4 * 6, dtype=torch.float32).view(4, 2, 6)
    memory, planes = register_tensors([whole[:, 0], whole[:, 1]], num_blocks=4)
    assert len(memory.regions) == 1
    for layer, plane in enumerate(planes):
        for block in range(4):
            source_bytes = memory.view(plane.get_range(block))
            assert torch.equal(source_bytes.view(torch.float32), whole[block, layer])


def test_a_layer_whose_blocks_are_scattered_is_refused() -> None:
    with pytest.raises(ValueError, match="no contiguous blocks"):
        register_tensors([torch.zeros(4, 2, 6).transpose(1, 2)], num_blocks=4)


def test_spans_outside_a_region_are_refused() -> None:
    memory = Memory([torch.zeros(10, dtype=torch.uint8)])
    for span in (ByteRange(1, 0, 1), ByteRange(0, 5, 6), ByteRange(0, -1, 2)):
        with pytest.raises(ValueError, match="region"):
            memory.view(span)


def test_blocks_that_continue_each_other_on_both_sides_are_one_copy() -> None:
    (one,) = plan_copies([PLANE], [3, 4, 5], [PLANE], [7, 8, 9])
    assert one.remote == ByteRange(0, 24, 24)
    assert one.local == ByteRange(0, 56, 24)
    assert len(list(plan_copies([PLANE], [3, 4, 5], [PLANE], [7, 9, 10]))) == 2


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(ValueError, match="match"):
        plan_copies([PLANE], [1], [PLANE], [1, 2])
    with pytest.raises(ValueError, match="size"):
        plan_copies([PLANE], [1], [LayerRegion(0, 0, 4, 4)], [1])


@given(
    source_blocks=st.permutations(range(12)),
    here=st.permutations(range(12)),
    count=st.integers(0, 12),
)
def test_copies_bring_every_block_to_its_place_and_nothing_else(
    source_blocks: list[int], here: list[int], count: int
) -> None:
    source = torch.randint(0, 255, (96,), dtype=torch.uint8)
    target = torch.zeros(96, dtype=torch.uint8)
    desired = list(zip(source_blocks[:count], here[:count], strict=True))
    for move in plan_copies([PLANE], source_blocks[:count], [PLANE], here[:count]):
        view = Memory([target]).view(move.local)
        view.copy_(Memory([source]).view(move.remote))
    expected = torch.zeros(96, dtype=torch.uint8)
    for a, b in desired:
        expected[b * 8 : b * 8 + 8] = source[a * 8 : a * 8 + 8]
    assert torch.equal(target, expected)
    assert sum(span.length for span in list_ranges([PLANE], source_blocks[:count])) == 8 * count
