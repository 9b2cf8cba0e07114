"""Makes a sample of a finished stream, with which it can be computed again as a whole. Pure.

Used by proxied requests. A sample has the token ids of prompt and output, as the continuation of a
lost stream does; its output must depend on nothing else.
"""

from collections.abc import Callable

import msgspec

from cleave.gateway.failover.resumption import (
    CHAT_PATH,
    CONTINUATION_FIELDS,
    RESUMABLE_PATHS,
    contains_media,
)
from cleave.gateway.failover.transcript import Transcript
from cleave.gateway.http.completion_request import CompletionRequest, decode_value
from cleave.gateway.upstream.handoff_samples import HandoffSample, HandoffSamples
from cleave.router.router import Pick

MAX_PROMPT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 256
"""Tokens of an output that are compared: those that follow depend on them."""

_DROPPED = ("cache_salt", "priority", "session_id", "stream", "stream_options", "user")
_KEPT = tuple(key for key in CONTINUATION_FIELDS if key not in _DROPPED)


def sample_handoff(
    samples: HandoffSamples,
    path: bytes,
    completion: CompletionRequest,
    pick: Pick,
    read_transcript: Callable[[], Transcript],
) -> None:
    """Keep a share of the greedy streams with a handoff; none of adapters whose source may have
    changed once they are computed again."""
    is_comparable = pick.prefill is not None and not pick.engine_model
    if not (is_comparable and is_greedy(path, completion) and samples.count_handoff()):
        return
    sample = build_sample(path, completion, pick, read_transcript())
    if sample is not None:
        samples.add(sample)


def is_greedy(path: bytes, completion: CompletionRequest) -> bool:
    """Whether a stream has token ids and its output depends on its prompt alone."""
    raw = completion.fields.get("temperature")
    is_comparable = completion.can_continue and path in RESUMABLE_PATHS
    return is_comparable and raw is not None and decode_value(raw) == 0


def build_sample(
    path: bytes,
    completion: CompletionRequest,
    pick: Pick,
    transcript: Transcript,
) -> HandoffSample | None:
    """A sample of a stream for which `is_greedy`; None: it cannot be compared."""
    prompt_ids, output = transcript.prompt_ids, transcript.list_ids(MAX_OUTPUT_TOKENS)
    if pick.prefill is None or not (prompt_ids and output):
        return None
    prompt_tokens = prompt_ids.count(b",") + 1
    is_media = path == CHAT_PATH and contains_media(completion.fields)
    if is_media or prompt_tokens > MAX_PROMPT_TOKENS:
        return None
    fields = {key: completion.fields[key] for key in _KEPT if key in completion.fields}
    least = (
        decode_value(completion.fields["min_tokens"]) if "min_tokens" in completion.fields else 0
    )
    if isinstance(least, int) and least > 0:
        # Until then no token may end the output; engines refuse more than they may compute.
        fields["min_tokens"] = msgspec.Raw(str(min(least, len(output))).encode())
    return HandoffSample(
        completion.model, pick.prefill, pick.decode, prompt_ids, prompt_tokens, output, fields
    )
