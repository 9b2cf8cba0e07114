"""vLLM on CPU with Cleave's own KV connector, behind the gateway: tokens, faults, freed memory."""

import concurrent.futures
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import Deployment, deployed, tiny_vllm, until
from owner_process import OwnerProcess
from vllm_cases import CASES, OUTPUT_TOKENS, TIMEOUT_S, Case, ask, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
RAN = "vllm:iteration_tokens_total_sum"
LEASE_S = 20
PREFILL_ORDER = {"do_remote_decode": True, "do_remote_prefill": False}


EVERY_WAY = pytest.mark.parametrize("vllm", ["shared memory", "gloo"], indirect=True)
ONE_WAY = pytest.mark.parametrize("vllm", ["shared memory"], indirect=True)


@pytest.fixture(scope="module")
def vllm(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    settings = {
        "kv_connector_extra_config": {
            "ways": [request.param],
            "checksums": True,
            "kv_lease_duration": LEASE_S,
        },
    }
    engine = {"connector": "Cleave", "args": ["--kv-transfer-config", json.dumps(settings)]}
    manifest = tiny_vllm(tiny_model, engine=engine)
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=420) as deployment:
        yield deployment


def lost(url: str) -> dict[str, float]:
    """Hand-offs that came to nothing, by reason, those that are zero left out."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines():
        if line.startswith("cleave_kv_lost_total{") and not line.endswith(" 0.0"):
            reason = line.split('reason="')[1].split('"')[0]
            found[reason] = found.get(reason, 0) + float(line.split()[-1])
    return found


def is_free(vllm: Deployment) -> bool:
    """Whether no engine holds blocks; each is asked something, for an idle one counts nothing."""
    case = Case(0, 1, chat=False, stream=False)
    urls = [engine_url(vllm, role) for role in ("prefill", "decode")]
    for url in urls:
        ask(url, case)
    return not any(metric(url, "vllm:kv_cache_usage_perc") for url in urls)


def prefill(url: str, case: Case, request_id: str) -> dict[str, Any]:
    """The hand-off of a prompt."""
    answer = post(url, case, request_id, max_tokens=1, kv_transfer_params=PREFILL_ORDER)
    handed: dict[str, Any] = answer["kv_transfer_params"]
    return handed


def decode(url: str, case: Case, handed: dict[str, Any] | None, request_id: str) -> list[int]:
    """Tokens that a decode engine gives with a hand-off."""
    answer = post(url, case, request_id, kv_transfer_params=handed)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def post(url: str, case: Case, request_id: str, **fields: object) -> dict[str, Any]:
    """An engine's answer to a case with these fields, in one piece."""
    body = {**case.body, "stream": False, **fields}
    body.pop("stream_options", None)
    response = httpx.post(
        url + case.path, json=body, timeout=TIMEOUT_S, headers={"X-Request-Id": request_id}
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@EVERY_WAY
def test_tokens_are_those_of_a_colocated_run_and_nothing_is_recomputed(vllm: Deployment) -> None:
    decoding = engine_url(vllm, "decode")
    ran = metric(decoding, RAN)
    cases = CASES + MORE
    split = [ask(vllm.url, case) for case in cases]
    # A token of output is a token run: the last prompt token runs to make the first.
    assert metric(decoding, RAN) - ran == sum(len(answer.tokens) for answer in split)
    colocated = [ask(engine_url(vllm, "prefill"), case) for case in cases]
    for case, answer, expected in zip(cases, split, colocated, strict=True):
        assert len(answer.tokens) == OUTPUT_TOKENS
        assert answer.tokens == expected.tokens, case
    assert lost(decoding) == {}
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


MORE = [
    Case(1000 + number, random.Random(number).randint(1, 1500), chat=False, stream=False)
    for number in range(40)
]


@EVERY_WAY
def test_requests_side_by_side_keep_their_own_tokens(vllm: Deployment) -> None:
    cases = MORE[:12]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm.url, case).tokens, cases))
    assert together == [ask(engine_url(vllm, "prefill"), case).tokens for case in cases]
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


@dataclass(frozen=True)
class Fault:
    """A hand-off that must not be used, and the reason that is counted for it."""

    reason: str
    change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None]
    """Own hand-off and that of another prompt -> what the decode engine is given."""


def altered(handed: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {**handed, "cleave": {**handed["cleave"], **fields}}


def of_other_boot(handed: dict[str, Any]) -> dict[str, Any]:
    return {**altered(handed, boot_id="before"), "remote_engine_id": "before"}


def of_other_request(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """It claims the prompt that is wanted, and names KV of another one."""
    return altered(other, prompt_digest=own["cleave"]["prompt_digest"], num_tokens=10**6)


def faults(talker: str, foreign: tuple[str, int]) -> dict[str, Fault]:
    """By name; `talker` is a port where nonsense is answered, `foreign` an owner of other KV."""
    dead, nonsense = ("127.0.0.1", 1), ("127.0.0.1", int(talker))
    return {
        "swapped": Fault("prompt", lambda _, other: altered(other, num_tokens=10**6)),
        "swapped and disguised": Fault("prompt", of_other_request),
        "stale epoch": Fault("epoch", lambda own, _: altered(own, epoch=10**6)),
        "stale boot": Fault("boot", lambda own, _: of_other_boot(own)),
        "unlike halves": Fault("malformed", lambda own, _: altered(own, boot_id="before")),
        "too short": Fault("malformed", lambda own, _: altered(own, num_tokens=3)),
        "without fields": Fault("malformed", lambda own, _: {**own, "cleave": {}}),
        "of vLLM's own connector": Fault(
            "malformed", lambda own, _: {k: v for k, v in own.items() if k != "cleave"}
        ),
        "dead peer": Fault("peer_lost", lambda own, _: altered(own, addresses=[dead])),
        "nonsense": Fault("peer_lost", lambda own, _: altered(own, addresses=[nonsense])),
        "no rank": Fault("layout", lambda own, _: altered(own, addresses=[])),
        "wrong layout": Fault(
            "layout",
            lambda own, _: {
                **altered(own, boot_id="boot-p", addresses=[foreign]),
                "remote_engine_id": "boot-p",
            },
        ),
    }


@pytest.fixture
def talker() -> Iterator[str]:
    """A port where every connection gets nonsense."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            with suppress(OSError):
                while True:
                    connected, _ = listening.accept()
                    with connected:
                        connected.sendall(b"\0\0\0\3abc")

        threading.Thread(target=talk, daemon=True).start()
        yield str(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def foreign() -> Iterator[tuple[str, int]]:
    """An owner whose KV lies otherwise."""
    owner = OwnerProcess()
    yield "127.0.0.1", owner.port
    owner.end()


ROUNDS = 9


@ONE_WAY
def test_no_fault_gives_a_wrong_token_and_each_is_counted(
    vllm: Deployment, talker: str, foreign: tuple[str, int]
) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    before, expired = lost(decoding), lost(source).get("expired", 0)
    expected: dict[str, float] = {}
    numbers = itertools.count(10_000)
    for round_ in range(ROUNDS):
        for name, fault in faults(talker, foreign).items():
            case, other = (
                Case(next(numbers), 150 + 40 * round_, chat=False, stream=False) for _ in range(2)
            )
            wanted = ask(source, case).tokens
            own = prefill(source, case, f"own-{case.number}")
            given = fault.change(own, prefill(source, other, f"other-{case.number}"))
            assert decode(decoding, case, given, f"own-{case.number}") == wanted, name
            expected[fault.reason] = expected.get(fault.reason, 0) + 1
    after = lost(decoding)
    assert {reason: after[reason] - before.get(reason, 0) for reason in expected} == expected
    # What nobody has pulled, and nothing else, is given up when its lease ends.
    abandoned = 2 * sum(expected.values())
    until(lambda: lost(source).get("expired", 0) - expired == abandoned, TIMEOUT_S, "leases end")
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


@ONE_WAY
def test_a_hand_off_given_twice_or_late_is_computed_anew(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    twice, late = (Case(n, 300, chat=False, stream=False) for n in (20_001, 20_002))
    expected = [ask(source, case).tokens for case in (twice, late)]
    handed = [prefill(source, case, f"late-{case.number}") for case in (twice, late)]
    before, expired = lost(decoding), lost(source).get("expired", 0)
    assert decode(decoding, twice, handed[0], "one") == expected[0]
    assert lost(decoding) == before
    assert decode(decoding, twice, handed[0], "two") == expected[0]
    until(lambda: lost(source).get("expired", 0) > expired, TIMEOUT_S, "the lease ends")
    assert decode(decoding, late, handed[1], "three") == expected[1]
    after = lost(decoding)
    assert after.pop("not_held") == before.pop("not_held", 0) + 2
    assert after == before


@ONE_WAY
def test_a_client_that_leaves_while_its_kv_is_awaited_frees_both_sides(vllm: Deployment) -> None:
    case = Case(30_000, 3_000, chat=False, stream=True)
    for _ in range(3):
        with (
            suppress(httpx.TimeoutException),
            httpx.stream("POST", vllm.url + case.path, json=case.body, timeout=0.3) as response,
        ):
            response.read()
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")
    assert ask(vllm.url, case).tokens == ask(engine_url(vllm, "prefill"), case).tokens
