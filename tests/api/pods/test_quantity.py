"""Kubernetes' quantities as numbers."""

import pytest

from cleave.api.pods.quantity import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("quantity", "cores"), [("500m", 0.5), (".5", 0.5), ("2.", 2), (3, 3), ("2e1", 20), ("1k", 1e3)]
)
def test_cores_are_whole_or_parts(quantity: str | int, cores: float) -> None:
    assert parse_quantity(quantity) == cores


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("6Gi", 6 * 2**30), ("128M", 128_000_000), ("1E", 10**18), ("1E3", 1000), ("1Ei", 2**60)],
)
def test_memory_is_in_bytes(quantity: str, size: int) -> None:
    assert parse_quantity(quantity) == size


@pytest.mark.parametrize("quantity", ["6GB", "-1", "", "nan", "1e999", "1 Gi"])
def test_what_is_no_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(quantity)


@pytest.mark.parametrize("text", ["60Gi", "128Mi", "8", "4500m", "0", "1000", "20m"])
def test_a_formatted_quantity_is_the_same_number(text: str) -> None:
    assert format_quantity(parse_quantity(text)) == text
