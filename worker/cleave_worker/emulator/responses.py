"""vLLM's JSON responses and server-sent events, as clients receive them. Used by the API.

Events of one stream differ only in one word, so the rest is encoded once per request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cleave_worker.emulator import tokenizer
from cleave_worker.emulator.api_requests import ApiCall
from cleave_worker.emulator.sequence import FinishReason

_PLACEHOLDER = "\0"
_ID_PLACEHOLDER = 4_000_000_007
DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Encodes the server-sent events of one choice of a stream."""

    def __init__(self, call: ApiCall, index: int = 0) -> None:
        self._call = call
        self._index = index
        self._offset = 0
        self._prompt_sent = False
        self._head: dict[str, object] = {
            "id": call.id,
            "object": "chat.completion.chunk" if call.chat else "text_completion",
            "created": call.created,
            "model": call.model,
        }
        # Words need no escaping in JSON: a token's event is three pieces around word and token id.
        self._prompt_sent = True
        ids = [_ID_PLACEHOLDER] if call.return_token_ids else None
        event = self._encode_event(_PLACEHOLDER, None, ids, None)
        self._prompt_sent = False
        self._before, _, rest = event.partition(json.dumps(_PLACEHOLDER)[1:-1].encode())
        self._between, _, self._after = rest.partition(str(_ID_PLACEHOLDER).encode())

    def encode_start(self) -> bytes:
        """Return the event before the first token: in a chat the role."""
        if not self._call.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt = list(self._call.request.prompt) if self._call.return_token_ids else None
        usage = self._build_running_usage(0)
        event = {**self._head, "choices": [choice], **usage, "prompt_token_ids": prompt}
        return encode_chunk(_format_event(event))

    def encode_word(self, token: int, text: bytes) -> bytes:
        """Return an HTTP chunk for a token that does not end the stream."""
        if self._call.return_token_ids:
            if not self._call.chat and not self._prompt_sent:
                return self.encode_tokens(text.decode(), [token], None)
            pieces = (self._before, text, self._between, token, self._after)
            return encode_chunk(b"%b%b%b%d%b" % pieces)
        return encode_chunk(b"%b%b%b" % (self._before, text, self._between))

    def encode_tokens(
        self,
        text: str,
        ids: Sequence[int],
        finish: FinishReason | None,
        stop: str | None = None,
        count: int = 0,
    ) -> bytes:
        """Return an HTTP chunk for tokens, perhaps the last ones, with the text they complete;
        `count`: of all tokens so far."""
        shown_ids = ids if self._call.return_token_ids else None
        return encode_chunk(self._encode_event(text, finish, shown_ids, ids, stop, count))

    def encode_usage(self, completion_tokens: int, cached_tokens: int | None) -> bytes:
        """Return the usage of all choices, if the client requested it; without details if
        `cached_tokens` is None."""
        if not self._call.include_usage:
            return b""
        usage = _build_usage(len(self._call.request.prompt), completion_tokens, cached_tokens)
        return encode_chunk(_format_event({**self._head, "choices": [], "usage": usage}))

    def _encode_event(
        self,
        text: str,
        finish: FinishReason | None,
        ids: Sequence[int] | None,
        generated: Sequence[int] | None,
        stop: str | None = None,
        count: int = 0,
    ) -> bytes:
        reason = finish.value if finish else None
        choice: dict[str, object] = {"index": self._index}
        logprobs = None
        if self._call.logprobs is not None and generated:
            logprobs = _build_logprobs(self._call, generated, self._offset)
            self._offset += sum(len(tokenizer.decode(token)) for token in generated)
        if self._call.chat:
            choice |= {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
            if finish:
                choice["stop_reason"] = stop
        else:
            choice |= {"text": text, "logprobs": logprobs, "finish_reason": reason}
            choice |= {"stop_reason": stop, "prompt_token_ids": None}
            if self._call.return_token_ids and not self._prompt_sent:
                choice["prompt_token_ids"] = list(self._call.request.prompt)
                self._prompt_sent = True
        choice["token_ids"] = ids
        return _format_event(
            {**self._head, "choices": [choice], **self._build_running_usage(count)}
        )

    def _build_running_usage(self, count: int) -> dict[str, object]:
        if not self._call.running_usage:
            return {}
        prompt = len(self._call.request.prompt)
        total = prompt + count
        usage = {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": count}
        return {"usage": usage}


def encode_failure(error: dict[str, object]) -> bytes:
    """Return the end of a stream that failed after its headers were sent, as vLLM ends it."""
    return encode_chunk(_format_event(error)) + encode_chunk(DONE)


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """One complete choice of a response."""

    tokens: Sequence[int]
    text: str
    finish: FinishReason
    stop: str | None = None
    """The stop string that ended it."""


def encode_response(
    call: ApiCall,
    choices: Sequence[CompletedChoice],
    kv_transfer_params: dict[str, object] | None,
    cached_tokens: int | None,
) -> bytes:
    """Return the JSON response to a call that does not stream; its usage is without details if
    `cached_tokens` is None."""
    num_output = sum(len(choice.tokens) for choice in choices)
    response: dict[str, object] = {
        "id": call.id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": [_build_choice(call, index, choice) for index, choice in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _build_usage(len(call.request.prompt), num_output, cached_tokens),
        "kv_transfer_params": kv_transfer_params,
    }
    if call.chat and call.return_token_ids:
        response["prompt_token_ids"] = list(call.request.prompt)
    return json.dumps(response, separators=(",", ":")).encode()


def _build_choice(call: ApiCall, index: int, completed: CompletedChoice) -> dict[str, object]:
    choice: dict[str, object] = {"index": index}
    if call.chat:
        choice["message"] = {"role": "assistant", "content": completed.text, "refusal": None}
    else:
        choice["text"] = completed.text
    logprobs = _build_logprobs(call, completed.tokens, 0) if call.logprobs is not None else None
    choice |= {"logprobs": logprobs, "finish_reason": completed.finish.value}
    choice["stop_reason"] = completed.stop
    choice["token_ids"] = list(completed.tokens) if call.return_token_ids else None
    return choice


def _build_logprobs(call: ApiCall, tokens: Sequence[int], offset: int) -> dict[str, object]:
    """Return invented log-probabilities in the form of the API; a token always has the same one."""
    words = [tokenizer.decode(token) for token in tokens]
    values = [-(token % 97) / 100 for token in tokens]
    pairs = list(zip(words, values, strict=True))
    if not call.chat:
        offsets = [offset + sum(map(len, words[:position])) for position in range(len(words))]
        top = [{word: value} for word, value in pairs]
        shown: dict[str, object] = {"text_offset": offsets, "token_logprobs": values}
        return {**shown, "tokens": words, "top_logprobs": top}
    entries = [{"token": w, "logprob": v, "bytes": list(w.encode())} for w, v in pairs]
    num_top = 1 if call.logprobs else 0
    return {"content": [{**entry, "top_logprobs": [entry] * num_top} for entry in entries]}


def encode_chunk(body: bytes) -> bytes:
    """Return one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def _format_event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _build_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
) -> dict[str, object]:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }
