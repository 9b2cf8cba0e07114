"""Kubernetes quantities as they are written in YAML."""

import pytest
from pydantic import ValidationError

from cleave.api.engine import Resources


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
