"""The engine of instances: which of them its connector can pair."""

import pytest

from cleave.api.engine import Connector
from cleave.api.role import Parallelism


@pytest.mark.parametrize(
    ("prefill", "decode", "can"),
    [(1, 8, True), (8, 1, True), (4, 4, True), (3, 6, True), (2, 3, False), (6, 4, False)],
)
def test_kv_goes_where_one_tensor_size_divides_the_other(
    prefill: int, decode: int, can: bool
) -> None:
    one, other = Parallelism(tensor=prefill), Parallelism(tensor=decode, pipeline=2)
    assert Connector.NIXL.can_pair(one, other) is can
    assert Connector.CLEAVE.can_pair(one, other)
