"""The last use of what was evicted last."""

from cleave_worker.scheduling.block_uses import BlockUses


def test_the_latest_use_of_the_block_that_was_evicted_last_counts() -> None:
    now_ns = 0
    uses = BlockUses(3, lambda: now_ns)
    for block in range(3):
        now_ns += 10
        uses.begin(block)
    assert uses.evicted_ns == 0
    uses.evict(1)
    assert uses.evicted_ns == 20
    now_ns = 50
    uses.begin(1)
    uses.begin(0)
    uses.evict(2)
    assert uses.evicted_ns == 30
    uses.evict(0)
    assert uses.evicted_ns == 50
