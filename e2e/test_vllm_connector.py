"""vLLM on CPU with Cleave's own KV connector, behind the gateway: tokens, faults, freed memory."""

import concurrent.futures
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from cleave_worker.transfer.transport import Transport

from e2e.support.deployments import Deployment, deployed, until
from e2e.support.handoffs import (
    RAN,
    decode,
    faults,
    give,
    is_free,
    lost,
    owning_other_kv,
    prefill,
    talking_nonsense,
    tiny_with_connector,
    unseen,
)
from e2e.support.vllm_prompts import (
    CASES,
    OUTPUT_TOKENS,
    TIMEOUT_S,
    Case,
    ask,
    engine_url,
    metric,
    must_have_moved_all,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    # Over gloo: test_vllm_transfer.py; over NIXL: benchmarks/kv/faults.py.
    manifest = tiny_with_connector(tiny_model, Transport.SHARED_MEMORY, checksums=True)
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=420) as deployment:
        yield deployment


def test_the_kv_path_is_verified_by_the_bytes_of_a_long_prompt(vllm: Deployment) -> None:
    for instance in vllm.instances().values():
        assert instance.kv_path.verified
        must_have_moved_all(instance.kv_path.detail)


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
    for number in range(8)
]


def test_requests_side_by_side_keep_their_own_tokens(vllm: Deployment) -> None:
    cases = MORE
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm.url, case).tokens, cases))
    assert together == [ask(engine_url(vllm, "prefill"), case).tokens for case in cases]
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_no_fault_gives_a_wrong_token_and_each_is_counted(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    before, expired = lost(decoding), lost(source).get("expired", 0)
    expected: dict[str, float] = {}
    cases = unseen(10_000)
    with talking_nonsense() as talker, owning_other_kv() as foreign:
        for given in give(vllm, faults(talker, foreign), cases):
            assert given.tokens == given.expected, given.name
            expected[given.reason] = expected.get(given.reason, 0) + 1
    after = lost(decoding)
    assert {reason: after[reason] - before.get(reason, 0) for reason in expected} == expected
    # Only unpulled blocks are freed when their lease ends.
    abandoned = 2 * sum(expected.values())
    until(lambda: lost(source).get("expired", 0) - expired == abandoned, TIMEOUT_S, "leases end")
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_a_handoff_given_twice_or_late_is_computed_anew(vllm: Deployment) -> None:
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
