"""Registered memory: regions, planes and the fewest copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import (  # noqa: E402
    ByteRange,
    LayerRegion,
    Memory,
    RangeCopy,
    chunk_ranges,
    copy_rows,
    cut_copies,
    list_ranges,
    pack_ranges,
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


def find_reference(
    target: torch.Tensor, source: torch.Tensor, pairs: list[tuple[ByteRange, ByteRange]]
) -> torch.Tensor:
    expected = target.clone()
    for own, remote in pairs:
        values = source[remote.offset : remote.offset + remote.length]
        expected[own.offset : own.offset + own.length] = values
    return expected


@given(
    source_blocks=st.permutations(range(12)),
    here=st.permutations(range(12)),
    count=st.integers(1, 12),
    row_bytes=st.sampled_from([1, 24, 512, 1536]),
    lengths=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_rows_by_index_are_the_ranges_that_were_named(
    source_blocks: list[int], here: list[int], count: int, row_bytes: int, lengths: list[int]
) -> None:
    block = 3 * row_bytes
    source = torch.randint(0, 255, (12 * block + 5,), dtype=torch.uint8)
    pairs = [
        (
            ByteRange(0, own * block, size * row_bytes),
            ByteRange(0, remote * block, size * row_bytes),
        )
        for own, remote, size in zip(
            here[:count], source_blocks[:count], lengths[:count], strict=True
        )
    ]
    packed = pack_ranges([remote for _, remote in pairs])
    remotes = [remote for _, remote in pairs]
    owns = [own for own, _ in pairs]
    for sides in (
        pairs,
        list(zip(packed, remotes, strict=True)),
        list(zip(owns, packed, strict=True)),
    ):
        target = torch.zeros_like(source)
        expected = find_reference(target, source, sides)
        copy_rows(Memory([target]), Memory([source]), sides)
        assert torch.equal(target, expected)


def test_a_chunk_of_one_layer_is_one_gather_and_one_scatter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    select, scatter = torch.index_select, torch.Tensor.index_copy_
    monkeypatch.setattr(
        torch, "index_select", lambda *a, **k: (calls.append("gather"), select(*a, **k))[1]
    )
    monkeypatch.setattr(
        torch.Tensor, "index_copy_", lambda *a: (calls.append("scatter"), scatter(*a))[1]
    )
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda *_: pytest.fail("one copy for each of the blocks")
    )
    layer = Memory([torch.randint(0, 255, (64 * 4096,), dtype=torch.uint8)])
    packed = Memory([torch.zeros(32 * 4096, dtype=torch.uint8)])
    spans = [ByteRange(0, block * 4096, 4096) for block in range(0, 64, 2)]
    copy_rows(packed, layer, list(zip(pack_ranges(spans), spans, strict=True)))
    back = Memory([torch.zeros(64 * 4096, dtype=torch.uint8)])
    copy_rows(back, packed, list(zip(spans, pack_ranges(spans), strict=True)))
    assert calls == ["gather", "scatter"]
    rows = layer.regions[0].view(64, 4096)
    assert torch.equal(back.regions[0].view(64, 4096)[::2], rows[::2])
    assert not back.regions[0].view(64, 4096)[1::2].any()


def test_rows_outside_a_region_are_refused_before_anything_is_copied() -> None:
    target = Memory([torch.zeros(2048, dtype=torch.uint8)])
    source = Memory([torch.ones(1024, dtype=torch.uint8)])
    good = (ByteRange(0, 0, 512), ByteRange(0, 0, 512))
    for bad in (
        (ByteRange(0, 512, 512), ByteRange(0, 1024, 512)),
        (ByteRange(0, 512, 512), ByteRange(0, 0, 256)),
        (ByteRange(0, 1792, 512), ByteRange(0, 0, 512)),
    ):
        with pytest.raises(ValueError, match=r"region|lengths"):
            copy_rows(target, source, [good, bad])
        assert not target.regions[0].any()


def test_rows_on_another_device_are_refused() -> None:
    here, elsewhere = (
        Memory([torch.zeros(4096, dtype=torch.uint8, device=name)]) for name in ("cpu", "meta")
    )
    pairs = [(ByteRange(0, 0, 1024), ByteRange(0, 0, 1024))]
    for target, source in ((here, elsewhere), (elsewhere, here)):
        with pytest.raises(ValueError, match=r"cannot copy rows from \w+ to \w+: they must"):
            target.copy_from(source, pairs)


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 50)] * 3), max_size=12),
    st.integers(1, 40),
)
def test_copies_are_cut_into_groups_as_ranges_are(
    drawn: list[tuple[int, int, int, int, int]], size: int
) -> None:
    copies = [
        RangeCopy(ByteRange(remote, at, length), ByteRange(local, to, length))
        for remote, local, at, to, length in drawn
    ]
    groups = [[part.tolist() for part in group] for group in cut_copies(copies, size)]
    remote, packed, local = zip(*groups, strict=True) if groups else ((), (), ())
    for side, found in (("remote", remote), ("local", local)):
        expected = chunk_ranges((getattr(copy, side) for copy in copies), size)
        assert [[ByteRange(*row) for row in group] for group in found] == list(expected)
    expected_packed = [pack_ranges([ByteRange(*row) for row in group]) for group in remote]
    assert [[ByteRange(*row) for row in group] for group in packed] == expected_packed
