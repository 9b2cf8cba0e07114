"""Roles change on real vLLM engines: who serves what, which tokens come, how engines schedule."""

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Iterator

import httpx
import pytest

from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, idle, until
from e2e.support.engine_keys import headers_for
from e2e.support.role_orders import Flipper
from e2e.support.vllm_prompts import metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TIMEOUT_S = 120
OUTPUT_TOKENS = 8
PREFILL, DECODE, MIXED = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED
FIRST, SECOND = "tiny-prefill-0", "tiny-decode-0"


@pytest.fixture
def flipper(vllm_pair: Deployment) -> Iterator[Flipper]:
    """Everybody goes home afterwards."""
    flipper = Flipper(vllm_pair)
    yield flipper
    flipper.flip(FIRST, PREFILL)
    flipper.flip(SECOND, DECODE)
    flipper.close()


def ask(url: str, prompt: list[int], max_tokens: int = OUTPUT_TOKENS) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers, path = headers_for(url), "/v1/completions"
    response = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response


def tokens(response: httpx.Response) -> list[int]:
    found = response.json()["choices"][0]["token_ids"]
    assert isinstance(found, list)
    return found


def prompts(count: int, start: int = 0) -> list[list[int]]:
    """Of different lengths and beginnings, so that nothing is cached."""
    lengths = itertools.cycle((30, 200, 700, 1_500))
    return [
        [20 + (start + number) % 400, *(30 + (number * 7 + at) % 300 for at in range(length))]
        for number, length in zip(range(count), lengths, strict=False)
    ]


def test_both_roles_change_and_requests_go_the_other_way(
    vllm_pair: Deployment, flipper: Flipper
) -> None:
    some = prompts(8)
    home = [ask(vllm_pair.url, prompt) for prompt in some]
    assert {answer.headers["x-cleave-prefill"] for answer in home} == {FIRST}
    assert {answer.headers["x-cleave-decode"] for answer in home} == {SECOND}

    # No prefill instance is ready in between: the decode instances do it all.
    flipper.flip(FIRST, DECODE)
    whole = [ask(vllm_pair.url, prompt) for prompt in some]
    reply = flipper.flip(SECOND, PREFILL)
    assert reply.kv_path.verified
    assert reply.kv_path.detail.startswith(f"{SECOND} -> {FIRST}: ")

    def goes_the_other_way() -> bool:
        headers = ask(vllm_pair.url, some[0], max_tokens=1).headers
        return headers.get("x-cleave-prefill") == SECOND

    until(goes_the_other_way, 30, "requests are split the other way")
    before = pulled(vllm_pair, FIRST)
    away = [ask(vllm_pair.url, prompt) for prompt in prompts(8, start=100)]
    assert {answer.headers["x-cleave-prefill"] for answer in away} == {SECOND}
    assert {answer.headers["x-cleave-decode"] for answer in away} == {FIRST}
    assert pulled(vllm_pair, FIRST) > before

    url = vllm_pair.instances()[FIRST].engine_url
    colocated = [tokens(ask(url, prompt)) for prompt in prompts(8, start=100)]
    assert [tokens(answer) for answer in away] == colocated
    assert [tokens(a) for a in home] == [tokens(a) for a in whole]


def test_flips_under_load_fail_nothing_and_change_no_token(
    vllm_pair: Deployment, flipper: Flipper
) -> None:
    some = prompts(6, start=200)
    expected = [tokens(ask(vllm_pair.url, prompt)) for prompt in some]
    ended = threading.Event()

    def load(number: int) -> int:
        count = 0
        while not ended.is_set():
            assert tokens(ask(vllm_pair.url, some[number])) == expected[number]
            count += 1
        return count

    turns = [(FIRST, DECODE), (SECOND, PREFILL), (FIRST, MIXED), (FIRST, PREFILL), (SECOND, DECODE)]
    with concurrent.futures.ThreadPoolExecutor(len(some)) as pool:
        running = [pool.submit(load, number) for number in range(len(some))]
        try:
            for instance, role in turns * 6:
                flipper.flip(instance, role)
        finally:
            ended.set()
        assert sum(future.result(timeout=TIMEOUT_S) for future in running) > 0
    until(lambda: idle(vllm_pair), 60, "nothing is held")


def test_the_engine_schedules_as_its_role_wants(vllm_pair: Deployment, flipper: Flipper) -> None:
    url = vllm_pair.instances()[SECOND].engine_url
    flipper.flip(SECOND, MIXED)
    done: list[int] = []

    def ask_and_note(length: int, start: int) -> None:
        ask(url, [start + length % 300] * length)
        done.append(length)

    def wait(
        start: int, pool: concurrent.futures.Executor
    ) -> list[concurrent.futures.Future[None]]:
        """A request takes the only seat; three wait, the longest first."""
        until(lambda: flipper.load(SECOND).num_running == 1, 60, "somebody runs")
        requests = []
        for number, length in enumerate((900, 60, 400), 1):
            requests.append(pool.submit(ask_and_note, length, start))
            until(lambda n=number: flipper.load(SECOND).num_waiting == n, 60, "it waits")
        return requests

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with running(url, 40):
            requests = wait(50, pool)
        for each in requests:
            each.result(timeout=TIMEOUT_S)
        assert done == [60, 400, 900]

        with running(url, 41):
            requests = wait(80, pool)
            flipper.flip(SECOND, DECODE)
            for each in requests:
                each.result(timeout=TIMEOUT_S)
            assert flipper.load(SECOND).num_running == 1, "it runs still: others had seats, too"


@contextlib.contextmanager
def running(url: str, start: int) -> Iterator[None]:
    """A request that runs until the block ends, or for 3,000 tokens."""
    body = {"model": "tiny", "prompt": [start] * 40, "max_tokens": 3_000}
    body |= {"ignore_eos": True, "stream": True, "temperature": 0}
    headers, path = headers_for(url), f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=TIMEOUT_S) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line[:1] not in ("", ":")).startswith("data: {")
        yield


def pulled(deployment: Deployment, instance: str) -> float:
    """Bytes of KV that an engine took from others."""
    return metric(deployment.instances()[instance].engine_url, "vllm:nixl_bytes_transferred_sum")
