"""The table of risks names tests that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`((?:tests|e2e)/\S+?\.py)::(\w+)`", (ROOT / "docs/risks.md").read_text())


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_each_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_risk_of_clients_pods_and_the_cluster_has_a_row() -> None:
    rows = re.findall(r"^\| ([SR]\d+) \|", (ROOT / "docs/risks.md").read_text(), re.MULTILINE)
    expected = {
        *(f"S{number}" for number in range(1, 21)),
        *(f"R{number}" for number in range(1, 6)),
    }
    assert set(rows) == expected
