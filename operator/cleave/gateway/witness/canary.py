"""One canary: a handoff of a new prompt between two engines, and what it shows.

Run by the witness. The prefill engine's own first token is the colocated run that the decode
engine's is compared with: it costs nothing more, and with the log-probabilities of the likeliest
tokens it shows altered KV that leaves the token the same. Prompts are random words, new to both
prefix caches, or nothing would be transferred. What is hard: a handoff may hang, and so may the
engine that waits for it; which one it is shows a prompt of that engine's own.
"""

import random
from dataclasses import dataclass

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.gateway.http.completion_request import KV_PARAMS_KEY, KV_REQUEST_PARAMS
from cleave.gateway.upstream.kv_transfer_params import HandoffError, count_blocks, read_handoff
from cleave.gateway.upstream.response_types import decode_completion
from cleave.gateway.witness import engine_call
from cleave.gateway.witness.engine_call import EngineAnswer, EngineCallError, EngineTimeoutError
from cleave.policy.kv_transfer_sample import TransferSample, make_random_prompt
from cleave.policy.pair_trust import TokenChoice, TokenVerdict, compare_tokens
from cleave.router.instance import Target
from cleave.rpc.pull_counters import PullCounters, parse_pull_counters

_PATH = b"/v1/completions"
_METRICS_PATH = b"/metrics"
_COUNTERS_S = 5.0
_MAX_CALL_S = 30.0
_HANG_S = 10.0
_HANG_PREFILLS = 10.0
"""A handoff hangs after so many seconds, and so many times that of its prefill. An engine that
canaries use is idle, and a prompt's KV comes over 1 Gbit/s in about that time."""
_ALIVE_S = 5.0
"""For an engine with a hanging handoff to compute a few words of its own."""
_ALIVE_CHARACTERS = 40
_NUM_LOGPROBS = 5


class BlurredCanaryError(RuntimeError):
    """The canary shows nothing about the pair; the message is one sentence."""


class FaultyCanaryError(RuntimeError):
    """The handoff went wrong; the message continues `PREFILL -> DECODE: ...`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """For the metrics: refused, hung, tokens, bytes, slow."""


@dataclass(slots=True)
class EngineCosts:
    """Time of both engines that a canary took, also if it failed."""

    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A handoff that both engines completed."""

    sample: TransferSample
    token: TokenVerdict


async def run_canary(
    context: GatewayContext,
    prefill: Target,
    decode: Target,
    model: str,
    characters: int,
    words: random.Random,
    costs: EngineCosts,
) -> CanaryAnswer:
    """Hand off a prompt of so many characters. `costs`: filled in, also when it fails.
    Raises BlurredCanaryError, FaultyCanaryError."""
    seconds = min(context.config.timeouts.first_byte_s, _MAX_CALL_S)
    request_id = context.make_request_id()
    body: dict[str, object] = {
        "model": model,
        "prompt": make_random_prompt(words, characters),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _NUM_LOGPROBS,
        # Several tokens may have the same text.
        "return_tokens_as_token_ids": True,
        "stream": False,
    }
    try:
        first = await engine_call.post(
            context, prefill, _PATH, {**body, KV_PARAMS_KEY: KV_REQUEST_PARAMS}, request_id, seconds
        )
        costs.prefill_ms = first.ms
        _check_status(prefill, first)
        handoff, num_tokens = _read_handoff(prefill, first.body, request_id)
        # After the prefill, so that earlier pulls of other handoffs do not count.
        before = await _fetch_counters(context, decode)
        fields = {**body, KV_PARAMS_KEY: handoff}
        hang_s = min(_HANG_S + _HANG_PREFILLS * first.ms / 1000, seconds)
        try:
            second = await engine_call.post(context, decode, _PATH, fields, request_id, hang_s)
        except EngineTimeoutError as error:
            own = {**body, "prompt": make_random_prompt(words, _ALIVE_CHARACTERS)}
            costs.decode_ms = await _check_alive(context, decode, own)
            text = f"the decode engine {error}, but computes a prompt of its own"
            raise FaultyCanaryError("hung", text) from error
        costs.decode_ms = second.ms
        if second.status >= 500:
            raise FaultyCanaryError("refused", f"the decode engine answered {second.status}")
        _check_status(decode, second)
        after = await _fetch_counters(context, decode)
    except EngineCallError as error:
        raise BlurredCanaryError(f"an engine {error}") from error
    verdict = compare_tokens(_read_token(prefill, first.body), _read_token(decode, second.body))
    blocks = count_blocks(first.body)
    sample = TransferSample(num_tokens, blocks, first.ms, second.ms, before, after)
    return CanaryAnswer(sample, verdict)


def _read_handoff(prefill: Target, body: bytes, request_id: bytes) -> tuple[msgspec.Raw, int]:
    try:
        handoff, num_tokens = read_handoff(body, prefill.boot_id, request_id)
    except HandoffError as error:
        raise FaultyCanaryError("refused", f"the handoff {error}") from error
    if handoff is None or num_tokens < 1:
        raise BlurredCanaryError(f"instance {prefill.instance} hands over no KV")
    return handoff, num_tokens


def _check_status(target: Target, answer: EngineAnswer) -> None:
    if answer.status != 200:
        raise BlurredCanaryError(f"instance {target.instance} answered {answer.status}")


async def _check_alive(context: GatewayContext, decode: Target, body: dict[str, object]) -> float:
    """How long the engine takes for a prompt without a handoff, ms. Raises EngineCallError,
    BlurredCanaryError: then the engine hangs, which says nothing about the pair."""
    request_id = context.make_request_id()
    answer = await engine_call.post(context, decode, _PATH, body, request_id, _ALIVE_S)
    _check_status(decode, answer)
    return answer.ms


async def _fetch_counters(context: GatewayContext, decode: Target) -> PullCounters:
    answer = await engine_call.fetch(context, decode, _METRICS_PATH, _COUNTERS_S)
    counters = parse_pull_counters(answer.body) if answer.status == 200 else None
    if counters is None:
        raise BlurredCanaryError(f"instance {decode.instance} counts no bytes of KV")
    return counters


def _read_token(target: Target, body: bytes) -> TokenChoice:
    """The first token of a completion and the likeliest ones."""
    try:
        choices = decode_completion(body).choices
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = f"the answer of {target.instance} cannot be read: {error}"
        raise BlurredCanaryError(text) from error
    if not choices:
        raise BlurredCanaryError(f"instance {target.instance} answered without a choice")
    logprobs = choices[0].logprobs
    if logprobs is None or not logprobs.tokens or not logprobs.top_logprobs:
        raise BlurredCanaryError(f"instance {target.instance} reports no log-probabilities")
    return TokenChoice(logprobs.tokens[0], logprobs.top_logprobs[0] or {})
