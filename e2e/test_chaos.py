"""A short storm over an emulated fleet: faults of every kind, and no answer is wrong.

`benchmarks/chaos/run.py` is the same for longer.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.chaos.expected_output import CHAT, COMPLETIONS, expect
from e2e.chaos.faults import WORKER_KINDS, draw
from e2e.chaos.requests import Ask
from e2e.chaos.requests import draw as draw_request
from e2e.chaos.verdict import Case, Seen, check_answer

RUN = Path(__file__).parents[1] / "benchmarks" / "chaos" / "run.py"
SEED = 20
SMALL = ("--prefill", "2", "--decode", "2", "--mixed", "1", "--clients", "8", "--gap", "0.4")


def hurt(*options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a short run."""
    ran = subprocess.run(
        [sys.executable, str(RUN), "emulated", *SMALL, *options, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.stdout, ran.stderr[-3_000:]
    return ran.returncode, json.loads(ran.stdout)


def test_a_short_storm_loses_nothing_and_serves_no_wrong_token() -> None:
    code, report = hurt("--seed", str(SEED), "--faults", "18", "--burst", "9")
    assert code == 0, report["violation"]
    assert sum(report["faults"].values()) >= 14
    assert len(report["faults"]) >= 6
    assert report["cases"]["RIGHT"] >= 50
    assert report["cases"].keys() <= {case.name for case in Case} - {"WRONG", "NO_INSTANCE"}


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


def test_only_what_cannot_be_resumed_may_say_so(ask: Ask) -> None:
    error = {"code": "engine_error", "message": "with temperature 0 or a seed it could"}
    seen = Seen(0, status=200, body=f"data: {json.dumps({'error': error})}\n\n".encode())
    assert check_answer(replace(ask, resumable=False), seen, False).case is Case.NOT_RESUMABLE
    assert check_answer(ask, seen, False).case is Case.ENGINES_FAILED


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
