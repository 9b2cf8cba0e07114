"""How many prompts a request has, and of how many tokens, estimated; some media are refused. Pure.

Used by `completion_request`. A tenant pays for a prompt whose client leaves before its engine has
counted it, so all that becomes part of one counts: `engine_fields` has the names, from vLLM's
request classes. What is hard: a request may have a thousand prompts or sixty thousand documents,
so what takes long may be interrupted; and a query is computed again with each document.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from cleave.gateway.http import bounded_json
from cleave.gateway.http.bounded_json import TooManyMembersError
from cleave.gateway.http.engine_fields import (
    MEDIA_KEY_BYTES,
    TABLES,
    find_media_key,
    may_have_parts,
)
from cleave.gateway.http.errors import GatewayError, build_bad_request
from cleave.gateway.http.large_json import (
    MAX_SPACE_BYTES,
    MIN_BYTES,
    locate_elements,
    scan_elements,
)
from cleave.gateway.http.token_estimate import (
    SHORT_BYTES,
    count_token_ids,
    estimate_short,
    estimate_tokens,
)
from cleave.time_slices import Steps

Fields = dict[str, msgspec.Raw]
_List = TypeVar("_List", bound=Sequence[msgspec.Raw])

EMBEDS_KEY = "prompt_embeds"

MAX_PROMPTS = 1_024
"""Limit of the prompts of one request."""
MAX_DOCUMENTS = 65_536
"""Limit of the documents that one request scores."""
_SEARCH_BYTES = 32 << 10
"""Searched at a time for a member that is refused, in at most 0.6 ms."""
_PROMPT_BYTES = 512
"""Measuring a prompt of a list takes as long as searching so many bytes, besides its own."""
_TOKEN_IDS = re.compile(rb"\[\s*-?\d")
SIDE_FIELDS = frozenset((
    "chat_template_kwargs", "documents", EMBEDS_KEY, "instruction", "suffix", "tools",
))  # fmt: skip
"""Fields that become part of the prompt of completions, besides the prompt itself."""
_SCORED_FIELDS = frozenset(("data_2", "documents", "items", "text_2"))
"""Each of their elements is scored with what these paths have besides, so that this is computed
once for each."""
_SCORE_PATHS = frozenset(path for path in TABLES if b"score" in path or b"rerank" in path)

_decode_prompts = bounded_json.BoundedListDecoder(MAX_PROMPTS).decode


def measure_short(fields: Fields) -> tuple[int, int] | None:
    """As `measure_prompt`; None: the prompt is long, or a list, or may have media and takes long
    to search."""
    messages = fields.get("messages")
    raw = messages or fields.get("prompt")
    if raw is None:
        return 1, 1
    if len(raw) > SHORT_BYTES or (messages is None and is_list(raw)):
        return None
    has_parts = messages is not None and may_have_parts(bytes(raw))
    if has_parts:
        if len(raw) > _SEARCH_BYTES:
            return None
        if find_media_key(bytes(raw)):
            raise _build_media_error("messages")
    return 1, estimate_short(raw, has_media=has_parts)


def measure_prompt(fields: Fields) -> Steps[tuple[int, int]]:
    """(number of prompts, estimated tokens of all of them). Raises GatewayError (400)."""
    raw = fields.get("messages")
    if raw is not None:
        yield from _inspect_prompt("messages", raw)
        return 1, (yield from estimate_tokens(raw, has_media=True))
    raw = fields["prompt"]
    if _is_list_of_prompts(raw):
        prompts = yield from _divide_prompts("prompt", raw)
        tokens, measured = 1, 0
        for prompt in prompts:
            measured += len(prompt) + _PROMPT_BYTES
            if measured > _SEARCH_BYTES:
                measured = 0
                yield
            tokens += yield from _measure_one_prompt(prompt)
        return len(prompts), tokens
    return 1, (yield from _measure_one_prompt(raw))


def is_list(raw: msgspec.Raw) -> bool:
    """Whether a value is a list."""
    return bytes(memoryview(raw)[:1]) == b"["


def _measure_one_prompt(raw: msgspec.Raw) -> Steps[int]:
    if is_list(raw):
        return (yield from count_token_ids(raw))
    return (yield from estimate_tokens(raw))


def _is_list_of_prompts(raw: msgspec.Raw) -> bool:
    """False: a text, or a list of token IDs."""
    begin = bytes(memoryview(raw)[:MAX_SPACE_BYTES])
    return begin.startswith(b"[") and _TOKEN_IDS.match(begin) is None


def _count_embeds(raw: msgspec.Raw) -> Steps[int]:
    """Prompts that are sent as embeddings: each element of a list is one, besides `prompt`."""
    if is_list(raw):
        return len((yield from _divide_prompts(EMBEDS_KEY, raw)))
    return int(bytes(memoryview(raw)[:4]) != b"null")


def _divide_prompts(name: str, raw: msgspec.Raw) -> Steps[list[msgspec.Raw]]:
    """The elements of a list of prompts in this field. Raises GatewayError (400)."""
    return (yield from _divide(name, _find_prompts(raw), MAX_PROMPTS))


def _find_prompts(raw: msgspec.Raw) -> Steps[list[msgspec.Raw]]:
    if len(raw) > MIN_BYTES:
        return (yield from scan_elements(raw, MAX_PROMPTS))
    return _decode_prompts(raw)


def _divide(name: str, elements: Steps[_List], limit: int) -> Steps[_List]:
    """The elements of the list in this field, of which there may be so many. Raises GatewayError
    (400)."""
    try:
        return (yield from elements)
    except TooManyMembersError:
        message = f"{name} is a list of more than {limit} prompts: send several requests"
        raise build_bad_request(message, param=name) from None
    except RecursionError:
        raise build_bad_request(f"{name} is nested too deeply", param=name) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Of a large body, whose values are only delimited.
        raise build_bad_request(f"{name}: {error}", param=name) from None


def measure_sides(fields: Fields, prompts: int, tokens: int) -> Steps[tuple[int, int]]:
    """(prompts, estimated tokens) of a completion with `SIDE_FIELDS`; `prompts` and `tokens`: of
    the rest. Raises GatewayError (400)."""
    for name in SIDE_FIELDS.intersection(fields):
        if name == EMBEDS_KEY:
            num_embeds = yield from _count_embeds(fields[name])
            has_text = bytes(memoryview(fields.get("prompt", b"null"))[:4]) != b"null"
            prompts = max(num_embeds + prompts * has_text, 1)
            tokens += num_embeds
        else:
            tokens += yield from estimate_tokens(fields[name])
    return prompts, tokens


def measure_texts(path: bytes, fields: Fields) -> Steps[int]:
    """Estimated tokens of all prompts of a request that is no completion; at least 1. Raises
    GatewayError (400)."""
    table, is_scored = TABLES[path], path in _SCORE_PATHS
    times, tokens = 1, 0
    for name in table.prompts:
        if name in fields:
            yield from _inspect_prompt(name, fields[name])
    if is_scored:
        for name in _SCORED_FIELDS.intersection(fields):
            times = max(times, (yield from _count_documents(name, fields[name])))
    for name in table.texts:
        if name in fields:
            count = yield from estimate_tokens(fields[name], has_media=name in table.prompts)
            is_repeated = is_scored and name not in _SCORED_FIELDS
            # As many queries as documents are scored one by one.
            if is_repeated and times > 1 and is_list(fields[name]):
                is_repeated = (yield from _count_documents(name, fields[name])) < times
            tokens += count * times if is_repeated else count
    return tokens or 1


def _count_documents(name: str, raw: msgspec.Raw) -> Steps[int]:
    """The elements of a list, or 1. Raises GatewayError (400)."""
    if not is_list(raw):
        return 1
    return len((yield from _divide(name, locate_elements(raw, MAX_DOCUMENTS), MAX_DOCUMENTS)))


def _inspect_prompt(name: str, prompt: msgspec.Raw) -> Steps[None]:
    """Refuse a field whose media have the member that engines take for a hash. Raises GatewayError
    (400)."""
    text = memoryview(prompt)
    for start in range(0, len(text), _SEARCH_BYTES):
        if start:
            yield
        if find_media_key(text[start : start + _SEARCH_BYTES + MEDIA_KEY_BYTES]):
            raise _build_media_error(name)


def _build_media_error(name: str) -> GatewayError:
    message = f"{name} names a medium by `uuid`: leave it out, engines recognise media by content"
    return build_bad_request(message, param=name)
