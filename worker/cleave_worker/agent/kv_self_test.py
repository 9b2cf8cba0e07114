"""The KV self-test: checks that a handoff from one engine to another transfers the KV, and that the
decode engine continues with the tokens of the prefill engine.

Called by `readiness` before a worker becomes ready. What is hard: engines accept foreign or damaged
KV silently, so tokens are compared. An engine that recomputes lost KV gives the right tokens, so
the decode engine must also have counted bytes, in proportion to the blocks of the handoff. Only the
engine knows the bytes per block, so a short and a long prompt are compared. Prompts are new to both
prefix caches, or nothing would be transferred. Greedy decoding on two machines may differ at
near-ties, so one good attempt of several is enough; a broken path fails all. Other handoffs count
into the same metrics and must not make this test fail. The engines may be of another version, so no
response of theirs may end the agent.
"""

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cleave_worker.agent import engine_api, http
from cleave_worker.agent.engine_api import Pulled

_TOKENS = 4
_TRIES = 3
_SHORT_CHARACTERS = 400
_LONG_TOKENS = 2560
"""More than the 2,048 tokens that vLLM computes in one step unless the GPU is large."""
_FILL = 0.9
"""Share of the model's length that a prompt may take, as its token count is an estimate."""
_PATIENCE = 0.5
"""Share of a request's time limit that the prefill of the long prompt may take."""
_PROPORTION = 0.9
"""Least bytes per block of the long prompt, relative to the short one."""
_LONGER = 2
"""Least tokens of the long prompt, relative to the short one, that make the ratio meaningful."""
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions from parsing a response that is not as vLLM's."""
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
    """The KV path does not work; the message is one sentence."""


class InconclusiveError(TransferError):
    """The test shows neither that the KV path works nor that it does not."""


class UncountedError(InconclusiveError):
    """The decode engine does not count KV bytes, so nothing can be verified."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine of a test."""

    instance: str
    url: str
    boot_id: str
    max_model_len: int = 0
    """In tokens; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One handoff with the right tokens, and the decode engine's counters before and after."""

    num_tokens: int
    """Tokens of the prompt."""
    num_blocks: int
    """KV blocks that the handoff names, over all KV cache groups; 0: it names none."""
    prefill_ms: float
    first_token_ms: float
    """From the decode request to its first token, including the transfer."""
    before: Pulled
    after: Pulled
    note: str = ""
    """What the test could not check; empty: nothing."""

    @property
    def num_bytes(self) -> float:
        """Bytes that the decode engine pulled, including those of other handoffs."""
        return self.after.num_bytes - self.before.num_bytes

    @property
    def seconds(self) -> float:
        """Duration of these pulls, summed over ranks and handoffs."""
        return self.after.seconds - self.before.seconds

    @property
    def bytes_per_s(self) -> float:
        """Mean over ranks and handoffs; 0 when the engine counts no time."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_alone(self) -> bool:
        """Whether the decode engine received no other handoff meanwhile."""
        return self.after.num_tokens - self.before.num_tokens <= self.num_tokens

    @property
    def block_bytes(self) -> float:
        """Bytes per block of the handoff."""
        return self.num_bytes / max(1, self.num_blocks)

    @property
    def num_lost(self) -> float:
        """Failures that the engine counted meanwhile, including those of other handoffs."""
        return self.after.num_lost - self.before.num_lost

    def describe(self) -> str:
        """Return bytes, tokens, time and rate as text."""
        rate = f", {self.bytes_per_s / 1e9:.3g} GB/s" if self.bytes_per_s else ""
        others = "" if self.is_alone else ", including other handoffs"
        return (
            f"{self.num_bytes / 1e6:,.2f} MB for {self.num_tokens:,} tokens "
            f"in {self.seconds:.3g} s{rate}{others}{self.note and f', {self.note}'}"
        )


async def verify_transfer(
    prefill: Endpoint, decode: Endpoint, model: str, *, seconds: float, random_words: random.Random
) -> Transfer:
    """Test one direction; each request gets `seconds`. Raises TransferError, InconclusiveError.

    Returns the handoff of the long prompt. If other handoffs blur the ratio in each attempt, it is
    enough that bytes arrived and no KV was lost.
    """
    try:
        # First, so that engines without counters compute nothing.
        await _pulled(decode, seconds)
        return await _verify(prefill, decode, model, seconds, random_words)
    except http.HttpError as error:
        raise TransferError(str(error)) from error
    except _UNREADABLE as error:
        raise TransferError(
            f"cannot parse a response of {prefill.instance} or {decode.instance}: {error!r:.200}"
        ) from error


async def _verify(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, rng: random.Random
) -> Transfer:
    fault_text = uncertainty = ""
    unproven: Transfer | None = None
    block_sizes: list[float] = []
    for _ in range(_TRIES):
        try:
            short, long = await _try_both(prefill, decode, model, seconds, rng)
        except _OtherTokensError:
            fault_text = (
                f"{decode.instance} continued a prompt of {prefill.instance} with other tokens"
            )
            continue
        num_lost = short.num_lost + long.num_lost
        is_alone = short.is_alone and long.is_alone
        if fault := find_fault(short, long):
            fault_text = f"{decode.instance} {fault}, handed off by {prefill.instance}"
            if long.num_bytes > 0:
                block_sizes.append(short.block_bytes)
        elif num_lost and not is_alone:
            uncertainty = f"{decode.instance} counted {num_lost:.0f} failed transfers of several"
        elif is_in_proportion(short, long):
            return long
        else:
            unproven = long
    if unproven:
        return unproven
    # A path that truncates KV does so alike each time; bytes of other handoffs vary.
    if block_sizes and min(block_sizes) < _PROPORTION * max(block_sizes):
        uncertainty = f"{decode.instance} pulled a different number of bytes per block each time"
    if uncertainty:
        raise InconclusiveError(
            f"{uncertainty}, so other handoffs hide the result; the test is repeated"
        )
    raise TransferError(f"{fault_text}, {_TRIES} times of {_TRIES}")


def find_fault(short: Transfer, long: Transfer) -> str:
    """Return what is wrong with the bytes of two handoffs with the right tokens; empty: nothing."""
    for sample in (short, long):
        if sample.num_bytes <= 0:
            return f"pulled no byte of the KV of {sample.num_tokens:,} prompt tokens"
    if short.is_alone and long.is_alone and not is_in_proportion(short, long):
        return (
            f"pulled {long.num_bytes:,.0f} bytes of the KV of {long.num_tokens:,} prompt tokens, "
            f"too few beside {short.num_bytes:,.0f} bytes of {short.num_tokens:,} tokens"
        )
    return ""


def is_in_proportion(short: Transfer, long: Transfer) -> bool:
    """Return whether both prompts were pulled with about as many bytes per block."""
    least = _PROPORTION * short.num_bytes * long.num_blocks
    return long.num_bytes * short.num_blocks >= least


class _OtherTokensError(Exception):
    """The two engines continued a prompt with different tokens."""


async def _try_both(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, rng: random.Random
) -> tuple[Transfer, Transfer]:
    """Hand off a short and a long prompt. Raises TransferError, _OtherTokensError."""
    # A token covers at least one character, so a prompt of n characters has at most n tokens.
    length = (
        min(endpoint.max_model_len or 1 << 20 for endpoint in (prefill, decode)) - _PROMPT_MARGIN
    )
    characters = max(1, min(_SHORT_CHARACTERS, length))

    def in_time(short: Transfer) -> float:
        """Return the tokens that fit a request's time, if the short one's was all computation."""
        return short.num_tokens * _PATIENCE * seconds * 1e3 / max(short.prefill_ms, 1e-3)

    short = await _try(prefill, decode, model, random_prompt(rng, characters), seconds)
    if in_time(short) < _LONGER * short.num_tokens:
        # It was queued, or warmed the engine up.
        short = await _try(prefill, decode, model, random_prompt(rng, characters), seconds)
    tokens = min(_LONG_TOKENS, _FILL * length, in_time(short))
    longer = max(characters, int(characters * tokens / short.num_tokens))
    long = await _try(prefill, decode, model, random_prompt(rng, longer), seconds)
    if long.num_tokens < _LONGER * short.num_tokens:
        long = replace(long, note="no longer prompt was tested")
    return short, long


async def _try(
    prefill: Endpoint, decode: Endpoint, model: str, prompt: str, seconds: float
) -> Transfer:
    """Hand off one prompt. Raises TransferError, _OtherTokensError."""
    request_id = f"cleave-verify-{uuid.uuid4().hex}"
    prefilled = await _prefill(prefill, model, prompt, seconds, request_id)
    # After the prefill, so that earlier pulls of other handoffs do not count.
    before = await _pulled(decode, seconds)
    text, first_ms = await _decode(decode, model, prompt, request_id, prefilled.params, seconds)
    after = await _pulled(decode, seconds)
    # Last, so that the prefill engine computes the KV that it hands off.
    if text != await _complete(prefill, model, prompt, seconds):
        raise _OtherTokensError
    return Transfer(
        prefilled.num_tokens, _count_blocks(prefilled.params), prefilled.ms, first_ms, before, after
    )


async def _pulled(decode: Endpoint, seconds: float) -> Pulled:
    if counters := await engine_api.pulled(decode.url, seconds):
        return counters
    raise UncountedError(
        f"{decode.instance} counts no bytes of KV: its /metrics has neither "
        "vllm:nixl_bytes_transferred nor cleave_kv_pulled_bytes_total; "
        "use engine.connector Nixl or Cleave, and no --disable-log-stats"
    )


def random_prompt(random_words: random.Random, characters: int) -> str:
    """Return new random words, at most `characters` long."""
    words: list[str] = []
    length = 0
    while length < characters:
        word = "".join(
            random_words.choices("abcdefghijklmnopqrstuvwxyz", k=random_words.randint(3, 8))
        )
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:characters]


async def _complete(engine: Endpoint, model: str, prompt: str, seconds: float) -> str:
    response = await _post(engine, _body(model, prompt), seconds)
    return _text(json.loads(response.body))


@dataclass(frozen=True, slots=True)
class _Handed:
    """Response of a prefill."""

    params: Mapping[str, object]
    num_tokens: int
    ms: float


async def _prefill(
    engine: Endpoint, model: str, prompt: str, seconds: float, request_id: str
) -> _Handed:
    body = {**_body(model, prompt), "max_tokens": 1, "kv_transfer_params": _PREFILL_ORDER}
    response = await _post(engine, body, seconds, request_id)
    content = json.loads(response.body)
    params = content.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise TransferError(f"{engine.instance} returned no KV handoff")
    if params.get("remote_engine_id") != engine.boot_id:
        raise TransferError(
            f"{engine.instance} handed off as {params.get('remote_engine_id')!r:.80}"
        )
    num_tokens = content["usage"]["prompt_tokens"]
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise TransferError(f"{engine.instance} counted {num_tokens!r:.80} prompt tokens")
    return _Handed(params, num_tokens, response.first_body_ms)


def _count_blocks(params: Mapping[str, object]) -> int:
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list):
        return 0
    return sum(len(group) for group in groups if isinstance(group, list))


async def _decode(
    engine: Endpoint,
    model: str,
    prompt: str,
    request_id: str,
    params: Mapping[str, object],
    seconds: float,
) -> tuple[str, float]:
    body = {**_body(model, prompt), "stream": True, "kv_transfer_params": params}
    response = await _post(engine, body, seconds, request_id)
    return _streamed_text(engine, response.body), response.first_body_ms


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
        response = await http.request("POST", url, body, seconds=seconds, headers=headers)
    except http.HttpError as error:
        raise TransferError(f"{engine.instance}: {error}") from error
    if response.status != 200:
        raise TransferError(
            f"{engine.instance} answered {response.status}: {_message(response.body)}"
        )
    return response


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
    texts: list[str] = []
    for event in events[:-1]:
        content = json.loads(event)
        if "error" in content:
            raise TransferError(f"{engine.instance}: {_message(event)}")
        if content.get("choices"):
            texts.append(_text(content))
    return "".join(texts)


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    # JSON may contain half of a surrogate pair, which a registration cannot.
    return text.encode(errors="replace").decode()
