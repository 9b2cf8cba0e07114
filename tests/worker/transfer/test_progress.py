"""What is moved while a prompt is computed: everything once, nothing before it is final."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_worker.transfer.progress import NO_PROGRESS, KvChunk, Progress, find_missing_chunks

PLANES = 4


@st.composite
def prefills(draw: st.DrawFn) -> list[Progress]:
    """What an owner announces: steps that end at some block, layer by layer or at once."""
    updates, blocks = [NO_PROGRESS], 0
    for size in draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)):
        if draw(st.booleans()):
            updates += [Progress(blocks, blocks + size, planes) for planes in range(1, PLANES + 1)]
        blocks += size
        updates.append(Progress(blocks, blocks, 0))
    return updates


@given(prefills(), st.integers(0, PLANES - 1), st.integers(1, PLANES), st.data())
def test_each_plane_of_each_block_is_moved_once_and_only_when_it_is_final(
    updates: list[Progress], first_plane: int, count: int, data: st.DataObject
) -> None:
    count = min(count, PLANES - first_plane)
    total = updates[-1].blocks_done
    first = data.draw(st.integers(0, total))
    heard = [one for one in updates[:-1] if data.draw(st.booleans())] + updates[-1:]
    have, moved = Progress(first, first, 0), []
    for one in heard:
        now = one.clip(range(first, total), first_plane, count)
        for piece in find_missing_chunks(have, now, count):
            for block in range(piece.first_block, piece.first_block + piece.num_blocks):
                for plane in range(piece.first_layer, piece.first_layer + piece.num_layers):
                    assert block < one.blocks_done or (
                        block < one.blocks_started and first_plane + plane < one.layers_done
                    )
                    moved.append((block, plane))
        have = now
    assert sorted(moved) == [
        (block, plane) for block in range(first, total) for plane in range(count)
    ]


def test_a_reader_that_was_slow_asks_for_few_large_pieces() -> None:
    assert find_missing_chunks(Progress(2, 6, 1), Progress(9, 12, 3), PLANES) == [
        KvChunk(2, 4, 1, 3),
        KvChunk(6, 3, 0, 4),
        KvChunk(9, 3, 0, 3),
    ]


@pytest.mark.parametrize("now", [Progress(1, 1, 0), Progress(4, 6, 0), Progress(2, 6, 1)])
def test_what_no_prefill_announces_is_refused(now: Progress) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        find_missing_chunks(Progress(2, 6, 2), now, PLANES)
