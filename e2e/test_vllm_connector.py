"""vLLM on CPU with Cleave's own KV connector, behind the gateway: tokens, faults, freed memory."""

import concurrent.futures
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cleave_worker.transfer.transport import Transport

from e2e.support.deployments import Deployment, deployed, until
from e2e.support.handoffs import (
    PREFILL_ORDER,
    RAN,
    decode,
    faults,
    give,
    is_free,
    lost,
    make_cases,
    name_source,
    outcomes,
    owning_other_kv,
    post,
    prefill,
    talking_nonsense,
    tiny_with_connector,
)
from e2e.support.vllm_prompts import (
    CASES,
    OUTPUT_TOKENS,
    TIMEOUT_S,
    Case,
    ask,
    engine_url,
    make_case,
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
    cases, before = CASES + MORE, lost(decoding)
    split = [ask(vllm.url, case) for case in cases]
    # A token of output is a token run: the last prompt token runs to make the first.
    assert metric(decoding, RAN) - ran == sum(len(answer.tokens) for answer in split)
    colocated = [ask(engine_url(vllm, "prefill"), case) for case in cases]
    for case, answer, expected in zip(cases, split, colocated, strict=True):
        assert len(answer.tokens) == OUTPUT_TOKENS
        assert answer.tokens == expected.tokens, case
    assert lost(decoding) == before
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


def test_engines_report_the_age_of_their_oldest_block(vllm: Deployment) -> None:
    began = time.monotonic()
    ask(vllm.url, make_case(700))
    before = read_ages_ms(vllm)
    assert before.keys() == {"tiny-prefill-0", "tiny-decode-0"}
    # They have served other tests, and nothing was evicted.
    assert all(age > 1e3 * (time.monotonic() - began) for age in before.values())
    until(
        lambda: all(age >= before[name] + 200 for name, age in read_ages_ms(vllm).items()),
        TIMEOUT_S,
        "all have grown older",
    )


def read_ages_ms(vllm: Deployment) -> dict[str, int]:
    return {h.registration.instance: h.load.oldest_kv_ms for h in vllm.healths()}


def test_no_fault_gives_a_wrong_token_and_each_is_counted(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    before, expired = lost(decoding), lost(source).get("expired", 0)
    expected: dict[str, float] = {}
    cases = make_cases()
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
    twice, late = make_case(300), make_case(300)
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
    case = make_case(3_000, stream=True)
    for _ in range(3):
        with (
            suppress(httpx.TimeoutException),
            httpx.stream("POST", vllm.url + case.path, json=case.body, timeout=0.3) as response,
        ):
            response.read()
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")
    assert ask(vllm.url, case).tokens == ask(engine_url(vllm, "prefill"), case).tokens


BLOCK_TOKENS = 128
STARTS_WITHIN_S = 300
PULLED = "vllm:external_prefix_cache_hits_total"


def compute(vllm: Deployment, case: Case, source: object, **fields: object) -> list[int]:
    """Tokens of the prefill engine alone, which may pull the prompt's beginning."""
    params = {"kv_transfer_params": {"prefix_source": source}} if source else {}
    url = engine_url(vllm, "prefill")
    answer = post(url, case, f"alone-{time.monotonic_ns()}", **params, **fields)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_the_next_turn_pulls_the_answer_from_the_decode_instance(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    case = make_case(600)
    choice = post(vllm.url, case, "turn-1", max_tokens=200)["choices"][0]
    said: list[int] = choice["prompt_token_ids"] + choice["token_ids"]
    prompt = said + choice["prompt_token_ids"][:50]
    before, counted = metric(source, PULLED), outcomes(source).get("pulled", 0)
    params = PREFILL_ORDER | {"prefix_source": name_source(vllm)}
    handed = post(source, case, "turn-2", prompt=prompt, max_tokens=1, kv_transfer_params=params)
    # Of the last token that was said no KV is anywhere.
    own = len(choice["prompt_token_ids"]) // BLOCK_TOKENS
    theirs = (len(said) - 1) // BLOCK_TOKENS
    assert theirs > own
    assert metric(source, PULLED) - before == (theirs - own) * BLOCK_TOKENS
    assert outcomes(source)["pulled"] == counted + 1
    params = {"kv_transfer_params": handed["kv_transfer_params"], "prompt": prompt}
    answer: dict[str, Any] = post(decoding, case, "turn-2", **params)
    alone = compute(vllm, case, None, prompt=prompt, cache_salt="computed here")
    assert answer["choices"][0]["token_ids"] == alone
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_what_cannot_be_pulled_is_computed_with_the_same_tokens(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    wrong: dict[str, dict[str, object]] = {
        "pulled": {},
        "boot": {"engine_id": "before"},
        "peer_lost": {"port": 1, "engine_id": "gone"},
        "malformed": {"port": "x"},
    }
    for outcome, changed in wrong.items():
        case = make_case(700)
        expected, before = ask(decoding, case).tokens, outcomes(source).get(outcome, 0)
        assert compute(vllm, case, name_source(vllm, **changed)) == expected, outcome
        assert outcomes(source)[outcome] == before + 1
    # Another tenant's prefix is found as little as one that was never there.
    for fields in ({"cache_salt": "another tenant"}, {}):
        case = make_case(700)
        expected = compute(vllm, case, None, cache_salt="computed here")
        if fields:
            assert ask(decoding, case).tokens == expected
        before = outcomes(source).get("missing", 0)
        assert compute(vllm, case, name_source(vllm), **fields) == expected
        assert outcomes(source)["missing"] == before + 1
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_prefixes_are_pulled_side_by_side(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    cases = [make_case(500) for _ in range(6)]
    expected = [ask(decoding, case).tokens for case in cases]
    before, place = outcomes(source).get("pulled", 0), name_source(vllm)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda case: compute(vllm, case, place), cases)) == expected
    assert outcomes(source)["pulled"] == before + len(cases)
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_turns_through_the_gateway_pull_what_the_decode_instance_has_said(
    vllm: Deployment,
) -> None:
    source, case = engine_url(vllm, "prefill"), make_case(1_500)
    text = str(case.body["prompt"])
    # Capital letters are tokens, so what was said has the same tokens in the next prompt.
    letters = post(source, case, "letters", prompt="BCDFGHJKLMNPQRSTVWXZ", max_tokens=1)
    fields = {"allowed_token_ids": letters["choices"][0]["prompt_token_ids"][1:], "max_tokens": 140}
    before = metric(source, PULLED)
    for turn in range(4):
        answer = post(vllm.url, case, f"talk-{turn}", prompt=text, **fields)
        usage, said = answer["usage"], answer["choices"][0]
        # As the prefill engine counts them: for the decode engine, all are.
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0 or turn == 0
        assert cached <= usage["prompt_tokens"] - len("BCDFG")
        alone = compute(vllm, case, None, prompt=text, cache_salt=f"alone-{turn}", **fields)
        assert said["token_ids"] == alone
        text += said["text"] + "BCDFG"
    assert metric(source, PULLED) > before
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_a_source_that_is_killed_meanwhile_costs_no_token(vllm: Deployment) -> None:
    source, case = engine_url(vllm, "prefill"), make_case(700)
    # A run of this test that failed has killed it.
    until(lambda: answers(engine_url(vllm, "decode")), STARTS_WITHIN_S, "the source serves")
    expected = ask(engine_url(vllm, "decode"), case).tokens
    place, before = name_source(vllm), count_lost(source)
    engine = vllm.engine("tiny-decode-0")
    processes = [engine, *engine.children(recursive=True)]
    for process in processes:
        process.suspend()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        computed = pool.submit(compute, vllm, case, place)
        until(lambda: metric(source, "vllm:num_requests_waiting"), TIMEOUT_S, "it waits")
        for process in processes:
            with suppress(Exception):
                process.kill()
        assert computed.result(TIMEOUT_S) == expected
    # On a busy machine the prompt may have waited too long before its source was killed.
    assert count_lost(source) == before + 1


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S).is_success
    except httpx.TransportError:
        return False


def count_lost(url: str) -> float:
    """Pulls whose source did not answer."""
    counted = outcomes(url)
    return counted.get("peer_lost", 0) + counted.get("time_out", 0)
