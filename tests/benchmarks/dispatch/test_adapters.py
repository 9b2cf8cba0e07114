"""What the benchmark of adapters counts."""

import adapters
import numpy as np
import pytest

PROMPTS = np.array([200, 400, 3_000])


def test_the_longer_requests_wait_for_their_adapter_the_fewer_are_brought() -> None:
    rows = adapters.measure(PROMPTS, instances=8, load=0.7, adapters=32, requests=4_000)
    brought = [row.brought for row in rows]
    assert brought == sorted(brought, reverse=True)
    assert brought[-1] < brought[0] / 1.5


def test_adapters_that_all_fit_are_brought_to_each_instance_once() -> None:
    rows = adapters.measure(PROMPTS, 4, 0.5, adapters.SLOTS, 4_000)
    assert rows[0].brought == pytest.approx(4 * adapters.SLOTS / 4_000)
    assert rows[0].mean_ms < min(row.mean_ms for row in rows[1:]), "then staying only costs"
