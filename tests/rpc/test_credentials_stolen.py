"""What a stolen credential opens, tried at every port of workers and gateways."""

import asyncio
from pathlib import Path

import pytest

from tests.support.stolen_credentials import (
    AUTHOR,
    NOTHING,
    WHOLE_OPERATOR,
    Opened,
    render,
    try_everything,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stolen-credentials.md"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return asyncio.run(try_everything(tmp_path_factory.mktemp("keys")))


def test_nothing_that_is_stolen_opens_another_deployment(opened: Opened) -> None:
    for name, (_, _, neighbour, other) in opened.items():
        if name != WHOLE_OPERATOR:
            assert other == opened[NOTHING][3], name
            assert name == AUTHOR or neighbour == opened[NOTHING][2], name


@pytest.mark.parametrize("who", ["worker", "gateway", "operator"])
def test_tokens_without_their_key_open_nothing_and_received_calls_nothing_elsewhere(
    opened: Opened, who: str
) -> None:
    assert opened[f"{who}: its tokens, without its key"] == opened[NOTHING]
    assert opened[f"{who}: a call that the worker received"][1:] == opened[NOTHING][1:]


def test_every_port_opens_to_those_that_may_use_it(opened: Opened) -> None:
    assert opened[WHOLE_OPERATOR][3] >= {"agent: Drain", "agent: SetRole", "engine: /tokenize"}
    assert "gateway: /v1/completions" in opened["client: its API key"][0]
    assert opened["handoff: the key of the worker's KV"][0] - opened[NOTHING][0] == {"KV port"}
    further = opened["worker: the same of a further pod of its instance"]
    assert ["launcher of ranks: Join" in place for place in further] == [True, False, False, False]


def test_the_page_says_what_opens(opened: Opened) -> None:
    assert render(opened) == PAGE.read_text(), "run `make generate`"
