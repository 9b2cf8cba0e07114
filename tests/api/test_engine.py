"""The engine of instances: which of them its connector can pair, and amounts of resources."""

import pytest
from pydantic import ValidationError

from cleave.api.engine import Connector
from cleave.api.pods.worker_template import Resources
from cleave.api.role import Parallelism


@pytest.mark.parametrize(
    ("prefill", "decode", "can"),
    [(1, 8, True), (8, 1, True), (4, 4, True), (3, 6, True), (2, 3, False), (6, 4, False)],
)
def test_kv_goes_where_one_tensor_size_divides_the_other(
    prefill: int, decode: int, can: bool
) -> None:
    one, other = Parallelism(tensor=prefill), Parallelism(tensor=decode, pipeline=2)
    assert (Connector.NIXL.explain_incompatibility(one, other, 8) is None) is can
    assert Connector.CLEAVE.explain_incompatibility(one, other, 8) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "can"),
    [(8, 4, 4, False), (16, 8, 8, False), (8, 8, 4, True), (4, 8, 4, True), (8, 4, 8, True)],
)
def test_fewer_gpus_do_not_take_kv_heads_that_are_kept_in_copies(
    prefill: int, decode: int, heads: int, can: bool
) -> None:
    one, other = Parallelism(tensor=prefill), Parallelism(tensor=decode)
    assert (Connector.NIXL.explain_incompatibility(one, other, heads) is None) is can
    assert Connector.NIXL.explain_incompatibility(one, other, None) is None
    assert Connector.CLEAVE.explain_incompatibility(one, other, heads) is None


@pytest.mark.parametrize("value", ["500m", "6Gi", "0.5", ".5", "1.", "2e3", "1E", "100", "3k"])
def test_quantities_are_kept_as_they_are_written(value: str) -> None:
    assert Resources.model_validate({"limits": {"cpu": value}}).limits == {"cpu": value}


def test_a_whole_number_becomes_text() -> None:
    assert Resources.model_validate({"limits": {"cpu": 2}}).limits == {"cpu": "2"}


@pytest.mark.parametrize(
    "value", ["", "6GB", "-1", "1 Gi", "Gi", "\u0663", 0.5, True, None, [1], "1\n"]
)
def test_what_kubernetes_would_refuse_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="must be a quantity"):
        Resources.model_validate({"limits": {"cpu": value}})
