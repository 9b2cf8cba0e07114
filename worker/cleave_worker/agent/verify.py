"""The KV self-test: does a hand-off from this prefill engine to that decode engine move the KV, and
give the tokens that the prefill engine alone gives?

Called by proof.py before a worker becomes ready. What is hard: engines accept foreign or damaged
KV silently, so tokens are compared; an engine that computes lost KV itself gives the right tokens,
so the decode engine must also have counted bytes, as many as the hand-off names blocks. How many
bytes a block has only the engine knows, so a short and a long prompt are handed off and compared.
Prompts are new to both prefix caches, or nothing would be transferred. Greedy decoding on two
machines may differ at a near-tie, so one good try in a few is enough; a broken path fails them all.
Other hand-offs count into the same series: what they may have caused is no fault of this one.
The engines may be of another version: no answer of theirs may end the agent.
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
"""Share of the model's length that a prompt may take: its tokens are an estimate."""
_PATIENCE = 0.5
"""Share of a request's time that the prefill of the long prompt may take."""
_PROPORTION = 0.9
"""Of the bytes that the blocks of the long prompt have by those of the short one."""
_LONGER = 2
"""Times as many tokens as the short prompt, from which the long one shows a proportion."""
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What answers raise that are not what vLLM answers."""
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
    """Tokens; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One hand-off with the right tokens, and what the decode engine counted meanwhile."""

    num_tokens: int
    """Of the prompt."""
    num_blocks: int
    """Of KV that the hand-off names, all KV cache groups together; 0: it does not tell."""
    prefill_ms: float
    first_token_ms: float
    """From the decode request to its first token, transfer included."""
    before: Pulled
    after: Pulled
    note: str = ""
    """What the test could not check; empty: nothing."""

    @property
    def num_bytes(self) -> float:
        """What the decode engine pulled, that of other hand-offs included."""
        return self.after.num_bytes - self.before.num_bytes

    @property
    def seconds(self) -> float:
        """How long that took, summed over ranks and hand-offs."""
        return self.after.seconds - self.before.seconds

    @property
    def bytes_per_s(self) -> float:
        """Mean over ranks and hand-offs; 0: the engine does not tell."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_alone(self) -> bool:
        """Whether the decode engine took no other hand-off meanwhile."""
        return self.after.num_tokens - self.before.num_tokens <= self.num_tokens

    @property
    def block_bytes(self) -> float:
        """Bytes for each block of the hand-off."""
        return self.num_bytes / max(1, self.num_blocks)

    @property
    def num_lost(self) -> float:
        """Failures that the engine counted meanwhile, those of other hand-offs included."""
        return self.after.num_lost - self.before.num_lost

    def describe(self) -> str:
        """Bytes, tokens, time and rate, for people."""
        rate = f", {self.bytes_per_s / 1e9:.3g} GB/s" if self.bytes_per_s else ""
        others = "" if self.is_alone else ", other hand-offs included"
        return (
            f"{self.num_bytes / 1e6:,.2f} MB for {self.num_tokens:,} tokens "
            f"in {self.seconds:.3g} s{rate}{others}{self.note and f', {self.note}'}"
        )


async def verify_transfer(
    prefill: Endpoint, decode: Endpoint, model: str, *, seconds: float, random_words: random.Random
) -> Transfer:
    """Test one direction; each request gets `seconds`. Raises TransferError, InconclusiveError.

    Returns the hand-off of the long prompt. Other hand-offs of the decode engine are counted, too:
    where they blur the proportion in each try, it is enough that bytes came and no KV was lost.
    """
    try:
        # First, so that engines without counters compute nothing.
        await _pulled(decode, seconds)
        return await _verify(prefill, decode, model, seconds, random_words)
    except http.HttpError as error:
        raise TransferError(str(error)) from error
    except _UNREADABLE as error:
        raise TransferError(
            f"cannot read what {prefill.instance} or {decode.instance} answered: {error!r:.200}"
        ) from error


async def _verify(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, words: random.Random
) -> Transfer:
    wrong = unclear = ""
    passed: Transfer | None = None
    shorts: list[float] = []
    for _ in range(_TRIES):
        try:
            short, long = await _try_both(prefill, decode, model, seconds, words)
        except _OtherTokensError:
            wrong = f"{decode.instance} continued a prompt of {prefill.instance} with other tokens"
            continue
        num_lost = short.num_lost + long.num_lost
        is_alone = short.is_alone and long.is_alone
        if fault := find_fault(short, long):
            wrong = f"{decode.instance} {fault}, handed off by {prefill.instance}"
            if long.num_bytes > 0:
                shorts.append(short.block_bytes)
        elif num_lost and not is_alone:
            unclear = f"{decode.instance} counted {num_lost:.0f} failed transfers of several"
        elif is_in_proportion(short, long):
            return long
        else:
            passed = long
    if passed:
        return passed
    # A path that cuts KV off does so alike each time; bytes of others come once and not again.
    if shorts and min(shorts) < _PROPORTION * max(shorts):
        unclear = f"{decode.instance} pulled unlike bytes for a block each time"
    if unclear:
        raise InconclusiveError(f"{unclear}, so other hand-offs hide how one went; tried again")
    raise TransferError(f"{wrong}, {_TRIES} times of {_TRIES}")


def find_fault(short: Transfer, long: Transfer) -> str:
    """What is wrong with the bytes of two hand-offs with the right tokens; empty: nothing shown."""
    for one in (short, long):
        if one.num_bytes <= 0:
            return f"pulled no byte of the KV of {one.num_tokens:,} prompt tokens"
    if short.is_alone and long.is_alone and not is_in_proportion(short, long):
        return (
            f"pulled {long.num_bytes:,.0f} bytes of the KV of {long.num_tokens:,} prompt tokens, "
            f"too few beside {short.num_bytes:,.0f} bytes of {short.num_tokens:,} tokens"
        )
    return ""


def is_in_proportion(short: Transfer, long: Transfer) -> bool:
    """Whether the blocks of the long prompt came with as many bytes each as the short one's."""
    least = _PROPORTION * short.num_bytes * long.num_blocks
    return long.num_bytes * short.num_blocks >= least


class _OtherTokensError(Exception):
    """The two engines continued a prompt in different ways."""


async def _try_both(
    prefill: Endpoint, decode: Endpoint, model: str, seconds: float, words: random.Random
) -> tuple[Transfer, Transfer]:
    """Hand-offs of a short and of a long prompt. Raises TransferError, _OtherTokensError."""
    # A token covers at least one character, so a prompt of n characters never exceeds n tokens.
    length = min(end.max_model_len or 1 << 20 for end in (prefill, decode)) - _PROMPT_MARGIN
    characters = max(1, min(_SHORT_CHARACTERS, length))

    def in_time(short: Transfer) -> float:
        """Tokens that a request computes, if the time of the short one was all computation."""
        return short.num_tokens * _PATIENCE * seconds * 1e3 / max(short.prefill_ms, 1e-3)

    short = await _try(prefill, decode, model, random_prompt(words, characters), seconds)
    if in_time(short) < _LONGER * short.num_tokens:
        # It waited, or warmed the engine up.
        short = await _try(prefill, decode, model, random_prompt(words, characters), seconds)
    tokens = min(_LONG_TOKENS, _FILL * length, in_time(short))
    longer = max(characters, int(characters * tokens / short.num_tokens))
    long = await _try(prefill, decode, model, random_prompt(words, longer), seconds)
    if long.num_tokens < _LONGER * short.num_tokens:
        long = replace(long, note="no longer prompt was tested")
    return short, long


async def _try(
    prefill: Endpoint, decode: Endpoint, model: str, prompt: str, seconds: float
) -> Transfer:
    """One hand-off. Raises TransferError, _OtherTokensError."""
    request_id = f"cleave-verify-{uuid.uuid4().hex}"
    handed = await _prefill(prefill, model, prompt, seconds, request_id)
    # After the prefill: what others move meanwhile does not count.
    before = await _pulled(decode, seconds)
    answer, first_ms = await _decode(decode, model, prompt, request_id, handed.params, seconds)
    after = await _pulled(decode, seconds)
    # Last, so that the prefill engine computes what it hands off.
    if answer != await _complete(prefill, model, prompt, seconds):
        raise _OtherTokensError
    return Transfer(
        handed.num_tokens, _count_blocks(handed.params), handed.ms, first_ms, before, after
    )


async def _pulled(decode: Endpoint, seconds: float) -> Pulled:
    if counted := await engine_api.pulled(decode.url, seconds):
        return counted
    raise UncountedError(
        f"{decode.instance} counts no bytes of KV: its /metrics has neither "
        "vllm:nixl_bytes_transferred nor cleave_kv_pulled_bytes_total; "
        "use engine.connector Nixl or Cleave, and no --disable-log-stats"
    )


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


async def _complete(engine: Endpoint, model: str, prompt: str, seconds: float) -> str:
    body = await _post(engine, _body(model, prompt), seconds)
    return _text(json.loads(body.body))


@dataclass(frozen=True, slots=True)
class _Handed:
    """What a prefill answered."""

    params: Mapping[str, object]
    num_tokens: int
    ms: float


async def _prefill(
    engine: Endpoint, model: str, prompt: str, seconds: float, request_id: str
) -> _Handed:
    body = {**_body(model, prompt), "max_tokens": 1, "kv_transfer_params": _PREFILL_ORDER}
    answer = await _post(engine, body, seconds, request_id)
    content = json.loads(answer.body)
    params = content.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise TransferError(f"{engine.instance} gave no KV hand-off")
    if params.get("remote_engine_id") != engine.boot_id:
        raise TransferError(
            f"{engine.instance} handed off as {params.get('remote_engine_id')!r:.80}"
        )
    num_tokens = content["usage"]["prompt_tokens"]
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise TransferError(f"{engine.instance} counted {num_tokens!r:.80} prompt tokens")
    return _Handed(params, num_tokens, answer.first_body_ms)


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
        text = str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    # Half of a surrogate pair is JSON, and no text that a registration can hold.
    return text.encode(errors="replace").decode()
