"""Iterations with the attention of a table."""

from collections.abc import Callable
from types import ModuleType

import pytest

from cleave.perf.timing import PromptChunk

Import = Callable[[str], ModuleType]


def test_what_prompts_and_decoding_cost_each_other_is_added(module: Import) -> None:
    sizes = (16, 32)
    ms = {(0, 0, n, 64): 1.0 * n for n in (1, 2)} | {(0, 0, 2, 128): 5.0}
    ms |= {(n, 0, 0, 0): 0.5 * n for n in sizes} | {(n, 0, 2, 64): 2.0 * n for n in sizes}
    attention = module("tabled_attention").TabledAttention(ms, layers=3, unevenness=0.1)
    assert attention.lengthen(7.0, [PromptChunk(0, 24)], []) == 7.0
    assert attention.lengthen(7.0, [], [64, 64]) == 7.0
    # 48 together, 12 and 2 apart.
    both = attention.lengthen(7.0, [PromptChunk(0, 24)], [64, 64])
    assert both == pytest.approx(7.0 + 3 * (48 - 12 - 2))


def test_uneven_contexts_cost_a_share_of_the_longest(module: Import) -> None:
    ms = {(0, 0, 2, 64): 2.0, (0, 0, 2, 128): 5.0}
    attention = module("tabled_attention").TabledAttention(ms, layers=1, unevenness=0.1)
    assert attention.lengthen(7.0, [], [0, 128]) == pytest.approx(7.3)
