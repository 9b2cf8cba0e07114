"""Pieces of a campaign, added up."""

import json
from pathlib import Path
from types import ModuleType

import pytest


def piece(**values: object) -> dict[str, object]:
    empty = {"faults": {}, "touched": {}, "cases": {}, "requests": 0, "seconds": 1, "violation": ""}
    return {"seed": 1, **empty, **values}


@pytest.fixture
def campaign(module) -> ModuleType:
    return module("campaign")


def test_faults_and_the_requests_beside_them_are_added_up_by_kind(campaign: ModuleType) -> None:
    one = piece(faults={"slow": 2}, touched={"slow": {"RIGHT": 5}})
    other = piece(faults={"slow": 1, "cut KV": 4}, touched={"slow": {"RIGHT": 1, "NO_INSTANCE": 2}})
    faults, touched = campaign.sum_up([one, other])
    assert faults == {"slow": 3, "cut KV": 4}
    assert touched == {"slow": {"RIGHT": 6, "NO_INSTANCE": 2}}


def test_a_piece_is_added_to_those_before_it_or_nothing_is(
    campaign: ModuleType, tmp_path: Path
) -> None:
    results = tmp_path / "build" / "chaos.json"
    campaign.write(results, [piece()])
    with pytest.raises(TypeError):
        campaign.write(results, [piece(), object()])
    assert json.loads(results.read_text()) == [piece()]
