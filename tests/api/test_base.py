"""Habits that every part of a resource has."""

import pytest
from pydantic import ValidationError

from cleave.api.deployment import Slo
from cleave.api.role import Parallelism


def test_python_writes_snake_case_and_yaml_camel_case() -> None:
    assert Slo(ttft_ms=400, tpot_ms=40).model_dump(exclude_none=True) == {
        "ttftMs": 400,
        "tpotMs": 40,
        "attainment": 0.9,
    }


def test_values_do_not_change() -> None:
    slo = Slo(ttft_ms=400, tpot_ms=40)
    with pytest.raises(ValidationError, match="frozen"):
        slo.ttft_ms = 1  # type: ignore[misc]


def test_the_gpus_of_an_instance_are_the_product_of_its_parallelism() -> None:
    assert Parallelism(tensor=4, pipeline=2).gpus == 8
