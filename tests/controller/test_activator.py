"""Requests that wait for deployments without instances."""

import pytest

from cleave.controller.activator import Activator
from cleave.rpc import http_client

PAGES = {
    "http://10.0.0.1:8081/health": b'{"status": "ok", "requests_in_flight": 2}',
    "http://10.0.0.2:8081/health": b'{"requests_in_flight": 1, "models": {}}',
    "http://10.0.0.3:8081/health": b"<html>",
}


async def fetch(url: str) -> bytes:
    try:
        return PAGES[url]
    except KeyError as error:
        raise http_client.HttpError("refused") from error


@pytest.fixture
def activator() -> Activator[str]:
    return Activator(fetch)


async def test_those_of_all_gateways_count(activator: Activator[str]) -> None:
    assert activator.get_waiting("chat") == 0
    assert await activator.poll("chat", ["10.0.0.1", "10.0.0.2"]) == 3
    assert activator.get_waiting("chat") == 3
    activator.forget("chat")
    assert activator.get_waiting("chat") == 0


async def test_an_unusable_answer_counts_as_no_waiting_requests(activator: Activator[str]) -> None:
    assert await activator.poll("chat", ["10.0.0.3", "10.0.0.4"]) == 0
