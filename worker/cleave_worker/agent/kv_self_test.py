"""The KV self-test: checks that a handoff from one engine to another transfers the KV, and that the
decode engine continues with the tokens of the prefill engine.

Called by `readiness` before a worker becomes ready. Engines accept foreign or damaged KV silently,
so tokens are compared. An engine that recomputes lost KV generates the right tokens, so the decode
engine must also have counted bytes, in proportion to the blocks of the handoff. Only the engine
knows the bytes per block, so a short and a long prompt are compared. Prompts are new to both prefix
caches, or nothing would be transferred. Greedy decoding on two machines may differ at near-ties, so
one good attempt of several is enough; a broken path fails all. Other handoffs count into the same
metrics and must not make this test fail. The engines may be of another version, so no response of
theirs may end the agent.
"""

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cleave.policy.kv_transfer_sample import (
    MIN_BYTES_RATIO,
    TransferSample,
    find_fault,
    is_proportional,
    make_random_prompt,
)
from cleave.rpc.engine_key import build_headers
from cleave.rpc.http_client import HttpError
from cleave.rpc.pull_counters import PullCounters
from cleave_worker.agent import engine_api

_OUTPUT_TOKENS = 4
_MAX_ATTEMPTS = 3
_SHORT_CHARACTERS = 400
_LONG_TOKENS = 2560
"""More than the 2,048 tokens that vLLM computes in one step unless the GPU is large."""
_MAX_LENGTH_SHARE = 0.9
"""Share of the model's length that a prompt may take, as its token count is an estimate."""
_MAX_PREFILL_TIME_SHARE = 0.2
"""Share of a request's time limit that the prefill of the long prompt may take: 6 s of a start."""
_MIN_LENGTH_RATIO = 2
"""Least tokens of the long prompt, relative to the short one, that make the ratio meaningful."""
_PARSE_ERRORS = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
"""Exceptions from parsing a response that is not as vLLM's."""
_PROMPT_MARGIN = 16
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class KvTestError(RuntimeError):
    """The KV path does not work; the message is one sentence."""


class InconclusiveError(KvTestError):
    """The test cannot decide whether the KV path works."""


class MissingCountersError(InconclusiveError):
    """The decode engine does not count KV bytes, so nothing can be verified."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine of a test."""

    instance: str
    url: str
    boot_id: str
    max_model_len: int = 0
    """In tokens; 0: unknown."""
    engine_key: str = field(default="", repr=False)


async def verify_transfer(
    prefill: Endpoint, decode: Endpoint, model: str, *, seconds: float, random_words: random.Random
) -> TransferSample:
    """Test one direction; each request gets `seconds`. Raises KvTestError, InconclusiveError.

    Returns the handoff of the long prompt. If other handoffs blur the ratio in each attempt, it is
    enough that bytes arrived and no KV was lost.
    """
    try:
        # First, so that engines without counters compute nothing.
        await _fetch_pull_counters(decode, seconds)
        return await _run_attempts(prefill, decode, model, seconds, random_words)
    except HttpError as error:
        raise KvTestError(str(error)) from error
    except _PARSE_ERRORS as error:
        engines = f"{prefill.instance} or {decode.instance}"
        raise KvTestError(f"cannot parse a response of {engines}: {error!r:.200}") from error


async def _run_attempts(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, rng: random.Random
) -> TransferSample:
    fault_text = uncertainty = ""
    inconclusive: TransferSample | None = None
    block_sizes: list[float] = []
    for _ in range(_MAX_ATTEMPTS):
        try:
            short, long = await _transfer_both(prefill, decode, model, seconds, rng)
        except _TokenMismatchError:
            engines = f"{decode.instance} continued a prompt of {prefill.instance}"
            fault_text = f"{engines} with other tokens"
            continue
        num_lost = short.num_failed + long.num_failed
        if fault := find_fault(short, long):
            fault_text = f"{decode.instance} {fault}, handed off by {prefill.instance}"
            if long.num_bytes > 0:
                block_sizes.append(short.block_bytes)
        elif num_lost and not (short.is_isolated and long.is_isolated):
            uncertainty = f"{decode.instance} counted {num_lost:.0f} failed transfers of several"
        elif is_proportional(short, long):
            return long
        else:
            inconclusive = long
    if inconclusive:
        return inconclusive
    # A path that truncates KV does so equally each time; bytes of other handoffs vary.
    if block_sizes and min(block_sizes) < MIN_BYTES_RATIO * max(block_sizes):
        uncertainty = f"{decode.instance} pulled a different number of bytes per block each time"
    if uncertainty:
        consequence = "so other handoffs hide the result; the test is repeated"
        raise InconclusiveError(f"{uncertainty}, {consequence}")
    raise KvTestError(f"{fault_text}, {_MAX_ATTEMPTS} times of {_MAX_ATTEMPTS}")


class _TokenMismatchError(Exception):
    """The two engines continued a prompt with different tokens."""


async def _transfer_both(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, rng: random.Random
) -> tuple[TransferSample, TransferSample]:
    """Hand off a short and a long prompt. Raises KvTestError, _TokenMismatchError."""
    # A token covers at least one character, so a prompt of n characters has at most n tokens.
    length = min(each.max_model_len or 1 << 20 for each in (prefill, decode)) - _PROMPT_MARGIN
    characters = max(1, min(_SHORT_CHARACTERS, length))

    async def transfer(characters: int) -> TransferSample:
        prompt = make_random_prompt(rng, characters)
        return await _transfer_once(prefill, decode, model, prompt, seconds)

    def in_time(short: TransferSample) -> float:
        """Return the tokens that fit a request's time, if the short one's was all computation."""
        limit_ms = _MAX_PREFILL_TIME_SHARE * seconds * 1e3
        return short.num_tokens * limit_ms / max(short.prefill_ms, 1e-3)

    short = await transfer(characters)
    for _ in range(_MAX_ATTEMPTS - 1):
        if in_time(short) >= _LONG_TOKENS:
            break
        # It may have been queued, or have warmed the engine up: the fastest shows the computation.
        short = min(short, await transfer(characters), key=lambda sample: sample.prefill_ms)
    tokens = min(_LONG_TOKENS, _MAX_LENGTH_SHARE * length, in_time(short))
    long = await transfer(max(characters, int(characters * tokens / short.num_tokens)))
    if long.num_tokens < _MIN_LENGTH_RATIO * short.num_tokens:
        long = replace(long, caveat="no longer prompt was tested")
    return short, long


async def _transfer_once(
    prefill: Endpoint, decode: Endpoint, model: str, prompt: str, seconds: float
) -> TransferSample:
    """Hand off one prompt. Raises KvTestError, _TokenMismatchError."""
    request_id = f"cleave-verify-{uuid.uuid4().hex}"
    prefilled = await _prefill(prefill, model, prompt, seconds, request_id)
    # After the prefill, so that earlier pulls of other handoffs do not count.
    before = await _fetch_pull_counters(decode, seconds)
    streaming = {"stream": True, "kv_transfer_params": prefilled.params}
    body = {**_build_body(model, prompt), **streaming}
    decoded = await _post(decode, body, seconds, request_id)
    text, first_ms = _join_streamed_text(decode, decoded.body), decoded.first_body_ms
    after = await _fetch_pull_counters(decode, seconds)
    # Last, so that the prefill engine computes the KV that it hands off.
    completed = await _post(prefill, _build_body(model, prompt), seconds)
    if text != _get_text(json.loads(completed.body)):
        raise _TokenMismatchError
    return TransferSample(
        prefilled.num_tokens, _count_blocks(prefilled.params), prefilled.ms, first_ms, before, after
    )


async def _fetch_pull_counters(decode: Endpoint, seconds: float) -> PullCounters:
    if counters := await engine_api.fetch_pull_counters(decode.url, seconds):
        return counters
    raise MissingCountersError(
        f"{decode.instance} counts no bytes of KV: its /metrics has neither "
        "vllm:nixl_bytes_transferred nor cleave_kv_pulled_bytes_total; "
        "use engine.connector Nixl or Cleave, and no --disable-log-stats"
    )


@dataclass(frozen=True, slots=True)
class _PrefillResult:
    """Response of a prefill."""

    params: Mapping[str, object]
    num_tokens: int
    ms: float


async def _prefill(
    engine: Endpoint, model: str, prompt: str, seconds: float, request_id: str
) -> _PrefillResult:
    body = {**_build_body(model, prompt), "max_tokens": 1, "kv_transfer_params": _PREFILL_PARAMS}
    response = await _post(engine, body, seconds, request_id)
    content = json.loads(response.body)
    params = content.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise KvTestError(f"{engine.instance} returned no KV handoff")
    if params.get("remote_engine_id") != engine.boot_id:
        raise KvTestError(f"{engine.instance} handed off as {params.get('remote_engine_id')!r:.80}")
    num_tokens = content["usage"]["prompt_tokens"]
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise KvTestError(f"{engine.instance} counted {num_tokens!r:.80} prompt tokens")
    return _PrefillResult(params, num_tokens, response.first_body_ms)


def _count_blocks(params: Mapping[str, object]) -> int:
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list):
        return 0
    return sum(len(group) for group in groups if isinstance(group, list))


def _build_body(model: str, prompt: str) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": _OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    }


async def _post(
    engine: Endpoint, body: dict[str, object], seconds: float, request_id: str = ""
) -> engine_api.EngineResponse:
    headers = build_headers(engine.engine_key)
    if request_id:
        headers["X-Request-Id"] = request_id
    url = f"{engine.url}/v1/completions"
    try:
        response = await engine_api.request("POST", url, body, seconds=seconds, headers=headers)
    except HttpError as error:
        raise KvTestError(f"{engine.instance}: {error}") from error
    if response.status != 200:
        message = _extract_message(response.body)
        raise KvTestError(f"{engine.instance} answered {response.status}: {message}")
    return response


def _get_text(completion: Mapping[str, object]) -> str:
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        raise KvTestError("an engine answered without choices")
    return str(choices[0].get("text", ""))


def _join_streamed_text(engine: Endpoint, body: bytes) -> str:
    lines = (line for line in body.splitlines() if line.startswith(b"data:"))
    events = [line.removeprefix(b"data: ") for line in lines]
    if not events or events[-1].strip() != b"[DONE]":
        raise KvTestError(f"{engine.instance} broke off its stream")
    texts: list[str] = []
    for event in events[:-1]:
        content = json.loads(event)
        if "error" in content:
            raise KvTestError(f"{engine.instance}: {_extract_message(event)}")
        if content.get("choices"):
            texts.append(_get_text(content))
    return "".join(texts)


def _extract_message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    # JSON may contain half of a surrogate pair, which a registration cannot.
    return text.encode(errors="replace").decode()
