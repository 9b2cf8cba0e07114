"""What clients receive: vLLM's JSON answers and server-sent events. Used by the API.

Events of one stream differ in a word only, so everything around it is encoded once per request.
"""

import json
import time
from collections.abc import Sequence

from cleave_worker.emulator import tokenizer
from cleave_worker.emulator.protocol import Call
from cleave_worker.emulator.sequence import Finish

_MARK = "\0"
DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Server-sent events of one stream."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._head: dict[str, object] = {
            "id": call.id,
            "object": "chat.completion.chunk" if call.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Words need no escaping in JSON, so a token's chunk is prefix + word + suffix.
        before, _, after = self._event(_MARK, None).partition(json.dumps(_MARK)[1:-1].encode())
        size = len(before) + len(after) + len(tokenizer.decode(tokenizer.choose(0)))
        self._prefix = b"%x\r\n%b" % (size, before)
        self._suffix = after + b"\r\n"

    def start(self) -> bytes:
        """What precedes the first token: chat names the role."""
        if not self._call.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return chunk(_event({**self._head, "choices": [choice], "prompt_token_ids": None}))

    def word(self, text: bytes) -> bytes:
        """A token that does not end the stream, as a whole HTTP chunk."""
        return self._prefix + text + self._suffix

    def end(self, token: int, finish: Finish, completion_tokens: int) -> bytes:
        """The last token and what follows it, without the HTTP chunk that ends the body."""
        events = chunk(self._event(tokenizer.decode(token), finish))
        if self._call.include_usage:
            usage = _usage(len(self._call.request.prompt), completion_tokens)
            events += chunk(_event({**self._head, "choices": [], "usage": usage}))
        return events + chunk(DONE)

    def _event(self, text: str, finish: Finish | None) -> bytes:
        reason = finish.value if finish else None
        choice: dict[str, object] = {"index": 0}
        if self._call.chat:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": reason}
            if finish:
                choice["stop_reason"] = None
            choice["token_ids"] = None
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": reason}
            choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        return _event({**self._head, "choices": [choice]})


def failure(error: dict[str, object]) -> bytes:
    """A stream that failed after its headers were sent ends as vLLM ends it."""
    return chunk(_event(error)) + chunk(DONE)


def whole(
    call: Call,
    model: str,
    tokens: Sequence[int],
    finish: Finish,
    kv_transfer_params: dict[str, object] | None,
) -> bytes:
    """The JSON answer to a call that does not stream."""
    text = "".join(map(tokenizer.decode, tokens))
    choice: dict[str, object] = {"index": 0}
    if call.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": finish.value, "stop_reason": None}
    choice["token_ids"] = None
    answer = {
        "id": call.id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(len(call.request.prompt), len(tokens)),
        "kv_transfer_params": kv_transfer_params,
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def chunk(body: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }
