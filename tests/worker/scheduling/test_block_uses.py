"""The oldest of the latest uses of blocks."""

from cleave_worker.scheduling.block_uses import BlockUses


def test_the_block_whose_latest_use_is_the_oldest_one_counts() -> None:
    now_ns = 0
    uses = BlockUses(lambda: now_ns)
    assert uses.oldest_ns == 0
    for block in (2, 0, 1):
        now_ns += 10
        uses.begin(block)
    assert uses.oldest_ns == 10
    now_ns = 50
    uses.begin(0)
    assert uses.oldest_ns == 10
    uses.begin(2)
    assert uses.oldest_ns == 30
    uses.clear()
    assert uses.oldest_ns == 50, "nothing from before is left"
    now_ns = 70
    assert uses.oldest_ns == 50
    uses.begin(0)
    assert uses.oldest_ns == 70
