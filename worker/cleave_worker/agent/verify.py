"""The KV self-test: does a hand-off from this prefill engine to that decode engine give the tokens
that the prefill engine alone gives?

Called by proof.py before a worker becomes ready. What is hard: engines accept foreign or damaged
KV silently, so only a comparison of tokens tells; the prompt must be new to both prefix caches,
or nothing would be transferred; and greedy decoding on two machines may differ at a near-tie, so
one match in a few tries is enough while a broken path fails all of them.
"""

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from cleave_worker.agent import engine_api, http
from cleave_worker.agent.engine_api import Pulled

_TOKENS = 4
_TRIES = 3
_PROMPT_CHARACTERS = 1600
_PROMPT_MARGIN = 16
_PREFILL_ORDER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class TransferError(RuntimeError):
    """The KV path does not work; one sentence."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine of a test."""

    instance: str
    url: str
    boot_id: str
    max_model_len: int = 0
    """Tokens; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a good hand-off went."""

    first_token_ms: float
    """From the decode request to its first token, transfer included."""
    bytes_per_s: float
    """What the decode engine pulled, over the time it took; 0: it does not tell."""
    way: str = ""
    """What carried it; empty: the engine does not tell."""


async def verify_transfer(
    prefill: Endpoint, decode: Endpoint, model: str, *, seconds: float, random_words: random.Random
) -> Transfer:
    """Test one direction; each request gets `seconds`. Raises TransferError."""
    wrong = ""
    for _ in range(_TRIES):
        prompt = random_prompt(random_words, _prompt_characters(prefill, decode))
        try:
            expected = await _complete(prefill, model, prompt, seconds)
            hand_off = await _prefill(prefill, model, prompt, seconds)
            before = await engine_api.pulled(decode.url, seconds)
            answer, first_ms = await _decode(decode, model, prompt, hand_off, seconds)
            after = await engine_api.pulled(decode.url, seconds)
        except http.HttpError as error:
            raise TransferError(str(error)) from error
        if answer == expected:
            return Transfer(first_ms, _rate(before, after), after.way)
        wrong = f"{decode.instance} continued a prompt of {prefill.instance} with other tokens"
    raise TransferError(f"{wrong}, {_TRIES} times of {_TRIES}")


def _rate(before: Pulled, after: Pulled) -> float:
    """Bytes per second of what was pulled in between; others' transfers are as good a measure."""
    seconds = after.seconds - before.seconds
    return (after.num_bytes - before.num_bytes) / seconds if seconds > 0 else 0.0


def random_prompt(random_words: random.Random, characters: int) -> str:
    """Words that no cache has seen, at most `characters` long."""
    words: list[str] = []
    length = 0
    while length < characters:
        word = "".join(
            random_words.choices("abcdefghijklmnopqrstuvwxyz", k=random_words.randint(3, 8))
        )
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:characters]


def _prompt_characters(*ends: Endpoint) -> int:
    # A token covers at least one character, so a prompt of n characters never exceeds n tokens.
    limits = (end.max_model_len - _PROMPT_MARGIN for end in ends if end.max_model_len)
    return max(1, min((_PROMPT_CHARACTERS, *limits)))


async def _complete(engine: Endpoint, model: str, prompt: str, seconds: float) -> str:
    body = await _post(engine, _body(model, prompt), seconds)
    return _text(json.loads(body.body))


async def _prefill(
    engine: Endpoint, model: str, prompt: str, seconds: float
) -> tuple[str, Mapping[str, object]]:
    request_id = f"cleave-verify-{uuid.uuid4().hex}"
    body = {**_body(model, prompt), "max_tokens": 1, "kv_transfer_params": _PREFILL_ORDER}
    answer = await _post(engine, body, seconds, request_id)
    params = json.loads(answer.body).get("kv_transfer_params")
    if not isinstance(params, dict):
        raise TransferError(f"{engine.instance} gave no KV hand-off")
    if params.get("remote_engine_id") != engine.boot_id:
        raise TransferError(f"{engine.instance} handed off as {params.get('remote_engine_id')}")
    return request_id, params


async def _decode(
    engine: Endpoint,
    model: str,
    prompt: str,
    hand_off: tuple[str, Mapping[str, object]],
    seconds: float,
) -> tuple[str, float]:
    request_id, params = hand_off
    body = {**_body(model, prompt), "stream": True, "kv_transfer_params": params}
    answer = await _post(engine, body, seconds, request_id)
    return _streamed_text(engine, answer.body), answer.first_body_ms


def _body(model: str, prompt: str) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    }


async def _post(
    engine: Endpoint, body: dict[str, object], seconds: float, request_id: str = ""
) -> http.Answer:
    headers = {"X-Request-Id": request_id} if request_id else None
    url = f"{engine.url}/v1/completions"
    try:
        answer = await http.request("POST", url, body, seconds=seconds, headers=headers)
    except http.HttpError as error:
        raise TransferError(f"{engine.instance}: {error}") from error
    if answer.status != 200:
        raise TransferError(f"{engine.instance} answered {answer.status}: {_message(answer.body)}")
    return answer


def _text(completion: Mapping[str, object]) -> str:
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        raise TransferError("an engine answered without choices")
    return str(choices[0].get("text", ""))


def _streamed_text(engine: Endpoint, body: bytes) -> str:
    events = [
        line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data:")
    ]
    if not events or events[-1].strip() != b"[DONE]":
        raise TransferError(f"{engine.instance} broke off its stream")
    pieces: list[str] = []
    for event in events[:-1]:
        content = json.loads(event)
        if "error" in content:
            raise TransferError(f"{engine.instance}: {_message(event)}")
        if content.get("choices"):
            pieces.append(_text(content))
    return "".join(pieces)


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
