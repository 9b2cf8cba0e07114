"""The tables of risks and of the threat model name tests that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = [
    named
    for page in ("docs/risks.md", "SECURITY.md")
    for named in re.findall(r"`((?:tests|e2e)/\S+?\.py)::(\w+)`", (ROOT / page).read_text())
]


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_each_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_risk_of_clients_pods_and_the_cluster_has_a_row() -> None:
    rows = re.findall(
        r"^\| ([CHRS]\d+(?: [CH]\d+)*) \|", (ROOT / "docs/risks.md").read_text(), re.MULTILINE
    )
    expected = {
        *(f"S{number}" for number in range(1, 21)),
        *(f"H{number}" for number in range(1, 15)),
        *(f"R{number}" for number in range(1, 9)),
        # C18 has never been given.
        *(f"C{number:02}" for number in range(1, 22) if number != 18),
    }
    assert {risk for row in rows for risk in row.split()} == expected
