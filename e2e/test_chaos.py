"""A short storm over an emulated fleet: faults of every kind, and no answer is wrong.

`benchmarks/chaos/run.py` is the same for longer.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from e2e.chaos import beat, control_plane
from e2e.chaos.expected_output import CHAT, COMPLETIONS, expect
from e2e.chaos.faults import FLEET, FLEET_KINDS, GATEWAY_KINDS, WORKER_KINDS, draw
from e2e.chaos.report import ended_by_interrupt
from e2e.chaos.requests import Ask
from e2e.chaos.requests import draw as draw_request
from e2e.chaos.run import Storm, shorten
from e2e.chaos.verdict import Case, Seen, check_answer, check_refusal_of_poison
from e2e.support.deployments import until

RUN = Path(__file__).parents[1] / "benchmarks" / "chaos" / "run.py"
SEED = 20
RUN_S = 420
STORM_S = 150
"""A busy machine gives a storm of so long time for fewer faults."""
pytestmark = pytest.mark.timeout(RUN_S + 30)
SMALL = ("--prefill", "2", "--decode", "2", "--mixed", "1", "--clients", "8", "--gap", "0.4")


def hurt(*options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a short run."""
    ran = subprocess.run(
        [sys.executable, str(RUN), "emulated", *SMALL, *options, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ran.stdout, ran.stderr[-3_000:]
    return ran.returncode, json.loads(ran.stdout)


def test_a_short_storm_loses_nothing_and_serves_no_wrong_token() -> None:
    options = ("--faults", "18", "--burst", "9", "--seconds", str(STORM_S))
    code, report = hurt("--seed", str(SEED), *options)
    assert code == 0, report["violation"]
    is_whole = report["seconds"] < STORM_S / 2
    assert sum(report["faults"].values()) >= (14 if is_whole else 6)
    assert len(report["faults"]) >= (6 if is_whole else 4)
    assert report["cases"]["RIGHT"] >= 50
    assert report["cases"].keys() <= {case.name for case in Case} - {"WRONG", "NO_INSTANCE"}


def test_gateways_that_are_frozen_or_starved_judge_no_engine() -> None:
    kinds = ("freeze gateway", "freeze gateway process", "freeze gateway loop", "starve gateway")
    only = [word for kind in kinds for word in ("--only", kind)]
    code, report = hurt("--seed", str(SEED), "--faults", "8", "--burst", "8", *only)
    assert code == 0, report["violation"]
    assert report["cases"].keys() == {"RIGHT"}
    # A prompt's KV may be given up meanwhile, which the decode engine answers with an error status.
    causes = ("recoveries", 'retries{cause="lost"', 'retries{cause="unreached"')
    assert [name for name in report["gateways"] if name.startswith(causes)] == []


def test_requests_that_end_engines_are_refused_after_two() -> None:
    code, report = hurt("--seed", str(SEED), "--faults", "2", "--only", "poison request")
    assert code == 0, report["violation"]
    assert report["faults"] == {"poison request": 2}


def test_corrupt_kv_is_detected_and_the_surrounding_faults_are_reported() -> None:
    code, report = hurt("--seed", "1", "--faults", "20", "--only", "wrong KV")
    assert code == 1
    assert "parts after" in report["violation"]
    assert "wrong KV: chaos-prefill-" in report["violation"]
    assert report["seed"] == 1


@pytest.fixture
def ask() -> Ask:
    body = {"model": "m", "prompt": "a b", "max_tokens": 5, "ignore_eos": True, "stream": True}
    return build_request(COMPLETIONS, body)


def build_request(path: str, body: dict[str, Any]) -> Ask:
    return Ask("one", path, body, True, expect(path, body, "m"))


def events(ask: Ask, *texts: str) -> bytes:
    head = {"id": "i", "created": 1, "object": "o", "model": "m"}
    choices = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
    choices[-1]["finish_reason"] = ask.expected.finishes[0]
    lines = [f"data: {json.dumps(head | {'choices': [choice]})}\n\n" for choice in choices]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def test_a_right_answer_is_right(ask: Ask) -> None:
    (text,) = ask.expected.texts
    seen = Seen(0, status=200, body=events(ask, text[:7], text[7:]))
    assert check_answer(ask, seen, False).case is Case.RIGHT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.replace(b'"text": " ', b'"text": "x', 1),
        lambda body: body.replace(b'"id": "i"', b'"id": "j"', 1),
        lambda body: body.replace(b"data: [DONE]\n\n", b""),
        lambda body: body.replace(b'"length"', b'"stop"'),
        lambda body: body + body,
        lambda body: body[: body.index(b"\n\n") + 2] + b"data: [DONE]\n\n",
        lambda body: body.replace(b'"text"', b'"kv_transfer_params": {}, "text"', 1),
        lambda body: b'data: {"error": {"code": "late", "message": "m"}}\n\n',
        lambda body: b"",
    ],
    ids=["token", "id", "end", "finish", "twice", "cut", "leak", "error", "nothing"],
)
def test_every_violation_is_found(ask: Ask, spoil) -> None:
    (text,) = ask.expected.texts
    body = spoil(events(ask, text[:6], text[6:]))
    assert check_answer(ask, Seen(0, status=200, body=body), False).case is Case.WRONG


def test_a_broken_connection_is_excused_by_a_killed_gateway_only(ask: Ask) -> None:
    seen = Seen(0, status=200, body=b"", broken="reset")
    assert check_answer(ask, seen, True).case is Case.GATEWAY_LOST
    assert check_answer(ask, seen, False).case is Case.WRONG
    wrong = replace(seen, body=events(ask, "x", "y").removesuffix(b"data: [DONE]\n\n"))
    assert check_answer(ask, wrong, True).case is Case.WRONG, "what came before the end counts"


def test_a_gateway_may_be_killed_after_any_byte_of_a_right_answer(ask: Ask) -> None:
    (text,) = ask.expected.texts
    body = events(ask, text[:6], text[6:])
    error = b'data: {"error": {"code": "engine_error", "message": "m"}}\n\n'
    failed = body[: body.index(b"\n\n") + 2] + error
    for whole in (body, failed):
        for count in range(len(whole) + 1):
            seen = Seen(0, status=200, body=whole[:count], broken="reset")
            assert check_answer(ask, seen, True).case is Case.GATEWAY_LOST, whole[:count]
    early = body.replace(b"data: ", b"data: [DONE]\n\ndata: ", 1)
    for wrong in (early, body + b"data: [DONE]\n\n"):
        verdict = check_answer(ask, Seen(0, status=200, body=wrong, broken="reset"), True)
        assert (verdict.case, "[DONE]" in verdict.reason) == (Case.WRONG, True)


async def test_an_interrupted_storm_begins_no_more_faults_and_reports() -> None:
    storm = cast("Storm", SimpleNamespace(lasting_s=float("inf")))
    with ended_by_interrupt(storm):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.to_thread(until, lambda: storm.lasting_s == 0, 10, "the storm to end")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_report_shows_a_short_body_whole_and_both_ends_of_a_long_one() -> None:
    assert shorten(b"a" * 4_096) == repr(b"a" * 4_096)
    long = b"a" * 2_048 + b"-" * 10 + b"b" * 2_048
    assert shorten(long) == f"{b'a' * 2_048!r} ... 10 bytes ... {b'b' * 2_048!r}"


def test_only_what_cannot_be_resumed_may_say_so(ask: Ask) -> None:
    error = {"code": "engine_error", "message": "with temperature 0 or a seed it could"}
    seen = Seen(0, status=200, body=f"data: {json.dumps({'error': error})}\n\n".encode())
    assert check_answer(replace(ask, resumable=False), seen, False).case is Case.NOT_RESUMABLE
    assert check_answer(ask, seen, False).case is Case.ENGINES_FAILED


def refusal(code: str, *, stream: bool = False) -> Seen:
    error = json.dumps({"error": {"code": code, "message": "m"}})
    if stream:
        return Seen(0, status=200, body=f"data: {error}\n\n".encode())
    return Seen(0, status=503, body=error.encode())


def test_only_a_large_request_may_be_refused_and_only_while_the_memory_is_full(ask: Ask) -> None:
    large = replace(ask, body=ask.body | {"metadata": {}})
    seen = refusal("receiving_too_much")
    assert check_answer(large, seen, False, gateway_full=True).case is Case.BUFFERS_FULL
    assert check_answer(large, seen, False, gateway_full=False).case is Case.WRONG
    assert check_answer(ask, seen, False, gateway_full=True).case is Case.WRONG


def test_a_request_that_ends_engines_may_get_an_error_and_nothing_else() -> None:
    assert check_refusal_of_poison(refusal("suspect_request"), False).case is Case.ENGINES_FAILED
    assert check_refusal_of_poison(Seen(0, status=200, body=b"{}"), False).case is Case.WRONG
    assert check_refusal_of_poison(Seen(0, broken="reset"), False).case is Case.WRONG
    assert check_refusal_of_poison(Seen(0, broken="reset"), True).case is Case.GATEWAY_LOST


def test_faults_of_gateways_and_fleets_find_their_victims() -> None:
    roles, gateways = {"a": "prefill"}, {"one": 1, "two": 2}
    kinds = GATEWAY_KINDS | FLEET_KINDS
    for fault in draw(random.Random(1), 200, kinds, roles, gateways, 1.0):
        expected = {FLEET} if fault.kind in FLEET_KINDS else set(gateways)
        if fault.kind.endswith("gateway process"):
            expected = {"two"}
        assert set(fault.victims) == expected, fault.kind


def test_control_plane_faults_come_in_the_middle_of_every_kind_of_change() -> None:
    drawn = control_plane.draw(random.Random(1), 200)
    assert drawn == control_plane.draw(random.Random(1), 200)
    assert {fault.kind for fault in drawn} == control_plane.LONGEST_S.keys()
    assert {fault.change for fault in drawn} == set(control_plane.CHANGES)


def test_the_beat_goes_slower_while_the_run_waits_for_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedstat, now_s = tmp_path / "schedstat", [0.0]
    monkeypatch.setattr(beat, "_SCHEDSTAT", schedstat)
    monkeypatch.setattr(beat.time, "monotonic", lambda: now_s[0])
    schedstat.write_text("0 0 1")
    clock = beat.Beat()
    schedstat.write_text("1000000000 3000000000 1")
    now_s[0] = 8.0
    assert clock.look() == 2.0
    schedstat.write_text("1000000000 903000000000 1")
    now_s[0] = 18.0
    assert clock.look() == 3.0, "however busy the machine is, waits end"
    assert clock.find_least_share(0.0, 10.0) == 0.25


def test_expected_answers_are_those_of_any_split(ask: Ask) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    seeded = build_request(CHAT, chat | {"seed": 3, "temperature": 1}).expected
    choices = build_request(CHAT, chat | {"n": 2}).expected
    assert (
        len({build_request(CHAT, chat).expected.texts[0], seeded.texts[0], choices.texts[1]}) == 3
    )
    assert choices.texts[0] == build_request(CHAT, chat).expected.texts[0]


def test_the_same_seed_draws_the_same_faults_and_requests() -> None:
    roles = {"a": "prefill", "b": "decode"}
    one, other = (draw(random.Random(5), 50, WORKER_KINDS, roles, {"g": 1}, 1.0) for _ in range(2))
    assert one == other
    first, second = (draw_request(random.Random(5), "r", "m") for _ in range(2))
    assert first == second
