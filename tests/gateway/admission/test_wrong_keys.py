"""How fast keys can be tried, and that clients with right ones do not feel it."""

import asyncio
import time

import pytest

from cleave.gateway.admission.wrong_keys import (
    BURST,
    PER_SECOND,
    TOTAL_BURST,
    TOTAL_PER_SECOND,
    WrongKeys,
)
from cleave.gateway.app import client_connection as client_module

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
RIGHT = "Bearer right-key-of-the-tests"
WRONG = "Bearer wrong-key-of-the-tests"


def count(keys: WrongKeys, addresses: list[str], since: float, seconds: float, rate: int) -> int:
    """Wrong keys that are answered at once, of `rate` a second."""
    times = [since + number / rate for number in range(int(seconds * rate))]
    return sum(keys.record(addresses[i % len(addresses)], now) for i, now in enumerate(times))


def test_an_address_has_a_burst_and_a_rate() -> None:
    keys = WrongKeys()
    assert count(keys, ["a"], 1_000, 100, 50) == pytest.approx(BURST + 100 * PER_SECOND, abs=2)
    assert keys.record("b", 1_100), "another one has its own"
    assert not keys.record("a", 1_100)
    assert keys.record("a", 1_110)


def test_all_addresses_together_have_one_as_well() -> None:
    keys = WrongKeys()
    addresses = [f"10.0.{n // 256}.{n % 256}" for n in range(20_000)]
    answered = count(keys, addresses, 1_000, 100, 500)
    assert answered <= TOTAL_BURST + 100 * TOTAL_PER_SECOND + 1


@pytest.mark.interpreted
async def test_further_wrong_keys_are_answered_late_and_right_ones_at_once(
    make_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(client_module, "WRONG_KEY_DELAY_S", 0.5)
    file = tmp_path / "keys"
    file.write_text(RIGHT.removeprefix("Bearer "))
    stage = await make_stage({"x": "mixed"}, api_keys=file)
    statuses = [(await stage.ask(ASK, Authorization=WRONG)).status for _ in range(BURST)]
    assert statuses == [401] * BURST
    began = time.monotonic()
    client = await stage.connect()
    client.send(ASK, Authorization=WRONG)
    client.send(ASK, Authorization=RIGHT)
    late = asyncio.create_task(client.read())
    served = [(await stage.ask(ASK, Authorization=RIGHT)).status for _ in range(5)]
    assert served == [200] * 5
    assert not late.done()
    refused = await late
    assert time.monotonic() - began >= 0.5
    assert (refused.status, refused.error["code"]) == (429, "too_many_wrong_keys")
    assert refused.headers["connection"] == "close"
    assert await client.is_closed(), "what follows a wrong key is not read"


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "fields",
    [
        {"x_api_key": "wrong-key-of-the-tests"},
        {"authorization": "Basic d3Jvbmc6a2V5"},
        {"authorization": WRONG, "expect": "100-continue"},
        {"authorization": "wrong"},
    ],
)
async def test_every_way_to_try_a_key_counts(make_stage, tmp_path, monkeypatch, fields) -> None:
    monkeypatch.setattr(client_module, "WRONG_KEY_DELAY_S", 0.1)
    file = tmp_path / "keys"
    file.write_text(RIGHT.removeprefix("Bearer "))
    stage = await make_stage({"x": "mixed"}, api_keys=file)
    seen = [(await stage.ask(ASK, **fields)).status for _ in range(BURST + 2)]
    assert seen == [401] * BURST + [429] * 2


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "path", ["/health", "/openapi.json", "/v1/models", "/metrics", "/v1/messages"]
)
async def test_no_path_tries_keys_faster(make_stage, tmp_path, monkeypatch, path: str) -> None:
    monkeypatch.setattr(client_module, "WRONG_KEY_DELAY_S", 0.1)
    file = tmp_path / "keys"
    file.write_text(RIGHT.removeprefix("Bearer "))
    stage = await make_stage({"x": "mixed"}, api_keys=file)
    body = ASK if path == "/v1/messages" else None
    seen = [(await stage.ask(body, path, Authorization=WRONG)).status for _ in range(BURST + 2)]
    assert seen[:BURST] == [seen[0]] * BURST
    assert seen[BURST:] == [429] * 2
    if path in ("/health", "/openapi.json"):
        assert (await stage.ask(None, path)).status == 200, "probes send no key"
    else:
        assert (await stage.ask(body, path)).status == 401, "no key is no wrong one"


@pytest.mark.interpreted
async def test_half_a_body_tries_no_key_faster(make_stage, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "WRONG_KEY_DELAY_S", 0.1)
    file = tmp_path / "keys"
    file.write_text(RIGHT.removeprefix("Bearer "))
    stage = await make_stage({"x": "mixed"}, api_keys=file)
    seen = []
    for _ in range(BURST + 2):
        client = await stage.connect()
        lines = ["POST /v1/completions HTTP/1.1", "Host: g", f"Authorization: {WRONG}"]
        head = "\r\n".join([*lines, "Content-Length: 9", "", ""])
        client.writer.write(head.encode())
        seen.append((await client.read()).status)
    assert seen == [401] * BURST + [429] * 2


def test_a_delay_is_longer_than_it_takes_to_try_again() -> None:
    assert client_module.WRONG_KEY_DELAY_S * PER_SECOND > 1
