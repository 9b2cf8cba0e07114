"""Request bodies of clients, checked as vLLM 0.32 does, and vLLM's errors. Used by the API.

The emulated model has one continuation at any temperature; only a seed, or the number of a choice,
gives another one. What cannot be emulated is rejected rather than ignored.
"""

import time
import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cleave.policy.request_targets import read_targets
from cleave_worker.emulator import constraints, tokenizer
from cleave_worker.emulator.sequence import EngineRequest, PrefixSource, RemotePrefill

_DEFAULT_COMPLETION_TOKENS = 16
_UNSUPPORTED = ("prompt_logprobs", "echo", "suffix", "best_of")
_MAX_CHOICES = 64
_MAX_LOGPROBS = 20
_FIELD_TYPES: Mapping[str, tuple[type, ...]] = {
    "cache_salt": (str,),
    "max_completion_tokens": (int,),
    "response_format": (dict,),
    "stream": (bool,),
    "stream_options": (dict,),
    "structured_outputs": (dict,),
    "temperature": (int, float),
    "tool_choice": (str, dict),
    "tools": (list,),
    "vllm_xargs": (dict,),
}
"""Allowed types, besides null, of fields that are not always checked elsewhere."""


class EmulatorApiError(Exception):
    """A response in vLLM's error format."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def build_body(self) -> dict[str, object]:
        """Return the JSON of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


def build_bad_request(message: str, param: str | None = None) -> EmulatorApiError:
    """Return an error with status 400."""
    return EmulatorApiError(400, message, "BadRequestError", param)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One checked API call."""

    id: str
    """As clients see it: cmpl-... or chatcmpl-..."""
    model: str
    """As the client named it: the base model or an adapter."""
    chat: bool
    stream: bool
    include_usage: bool
    """The counts of all choices in a last event."""
    running_usage: bool
    """The counts of a choice so far in each of its events, too."""
    requests: tuple[EngineRequest, ...]
    """One request per choice."""
    return_token_ids: bool = False
    """Whether responses contain token ids."""
    logprobs: int | None = None
    """Alternatives per token in the log-probabilities; None: no log-probabilities."""
    stop: tuple[str, ...] = ()
    """Strings that end the response and are not part of it."""
    interval: int = 1
    """Tokens of an event of a stream, after its first and before its last one."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time, equal in all events of a stream."""

    @property
    def request(self) -> EngineRequest:
        """The first request; all have the same prompt."""
        return self.requests[0]


def parse_adapter(body: object) -> tuple[str, str]:
    """Return (name, path) of a body for vLLM's paths that load and unload LoRA adapters; the path
    is empty where there is none. Raises EmulatorApiError."""
    fields = body if isinstance(body, dict) else {}
    name, path = fields.get("lora_name"), fields.get("lora_path", "")
    if not isinstance(name, str) or not isinstance(path, str) or not name:
        raise EmulatorApiError(400, "'lora_name' needs to be provided.", "InvalidUserInput")
    return name, path


def parse_call(
    body: object, chat: bool, models: Sequence[str], max_model_len: int, headers: Mapping[str, str]
) -> ApiCall:
    """Check a JSON body; `models`: the base model, then adapters. Raises EmulatorApiError."""
    if not isinstance(body, dict):
        raise build_bad_request("The request body must be a JSON object.")
    model = body.get("model", models[0])
    if model not in models:
        fault = f"The model `{model}` does not exist."
        raise EmulatorApiError(404, fault, "NotFoundError", "model")
    _reject_unsupported(body)
    if (wrong := constraints.find_fault(body, chat)) is not None:
        raise build_bad_request(*wrong)
    prompt = _parse_chat_prompt(body) if chat else _parse_completion_prompt(body)
    stream = bool(body.get("stream"))
    external = headers.get("X-Request-Id") or uuid.uuid4().hex
    call_id = f"chatcmpl-{external}" if chat else f"cmpl-{external}"
    internal = call_id if chat else f"{call_id}-0"
    max_tokens = _parse_max_tokens(body, chat, len(prompt), max_model_len)
    min_tokens = _parse_integer(body, "min_tokens", 0) or 0
    if min_tokens > max_tokens:
        fault = f"must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        raise build_bad_request(f"min_tokens {fault}", "min_tokens")
    hold, handoff, source = _parse_kv_transfer(body)
    request = EngineRequest(
        id=f"{internal}-{uuid.uuid4().hex[:8]}",
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.get("ignore_eos")),
        do_remote_decode=hold,
        handoff=handoff,
        source=source,
        seed=_parse_integer(body, "seed", None) if body.get("temperature") != 0 else None,
        adapter=model if model != models[0] else "",
        cache_salt=body.get("cache_salt") or "",
        targets=read_targets(body.get("vllm_xargs")),
    )
    count = _count_choices(body)
    if count > 1 and (hold or handoff):
        raise build_bad_request("A handoff supports one choice only: n must be 1.", "n")
    choices = [replace(request, id=f"{request.id}-{i}", choice=i) for i in range(1, count)]
    return ApiCall(
        id=call_id,
        model=model,
        chat=chat,
        stream=stream,
        include_usage=_parse_usage_option(body, stream, "include_usage"),
        running_usage=_parse_usage_option(body, stream, "include_usage")
        and _parse_usage_option(body, stream, "continuous_usage_stats"),
        requests=(request, *choices),
        return_token_ids=bool(body.get("return_token_ids")),
        logprobs=_parse_logprobs(body, chat),
        stop=_parse_stop(body),
        interval=_parse_interval(body),
    )


def parse_prompt(body: object) -> "array[int]":
    """Return the token ids for /tokenize, of a prompt or a chat. Raises EmulatorApiError."""
    if not isinstance(body, dict):
        raise build_bad_request("The request body must be a JSON object.")
    return _parse_chat_prompt(body) if "messages" in body else _parse_completion_prompt(body)


def _reject_unsupported(body: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if body.get(name):
            raise build_bad_request(f"{name} is not emulated.", name)
    for name, kinds in _FIELD_TYPES.items():
        if body.get(name) is not None and type(body[name]) not in kinds:
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise build_bad_request(f"{name} must be {allowed}, got {body[name]!r:.40}.", name)
    if (temperature := body.get("temperature") or 0) < 0:
        fault = f"temperature must be non-negative, got {temperature}."
        raise build_bad_request(fault, "temperature")


def _count_choices(body: dict[str, Any]) -> int:
    count = _parse_integer(body, "n", 1)
    if count is None or not 1 <= count <= _MAX_CHOICES:
        raise build_bad_request(f"n must be 1 to {_MAX_CHOICES}, got {count}.", "n")
    return count


def _parse_logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if chat and not body.get("logprobs"):
        return None
    name = "top_logprobs" if chat else "logprobs"
    count = _parse_integer(body, name, 0 if chat else None)
    if count is not None and count > _MAX_LOGPROBS:
        raise build_bad_request(f"{name} must be at most {_MAX_LOGPROBS}, got {count}.", name)
    return count


def _parse_stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        fault = "stop must be a text or a list of texts, none of them empty."
        raise build_bad_request(fault, "stop")
    return tuple(texts)


def _parse_completion_prompt(body: dict[str, Any]) -> "array[int]":
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise build_bad_request("The emulated engine takes one prompt per request.", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise build_bad_request("prompt must be a string or a list of token ids.", "prompt")
    if not prompt:
        raise build_bad_request("The decoder prompt cannot be empty", "prompt")
    if min(prompt) < 0 or max(prompt) >= tokenizer.VOCAB_SIZE:
        raise build_bad_request(f"Token id {max(prompt)} is out of vocabulary", "prompt")
    return array("I", prompt)


def _parse_chat_prompt(body: dict[str, Any]) -> "array[int]":
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise build_bad_request("messages must be a list with at least one message.", "messages")
    continues = bool(body.get("continue_final_message"))
    if continues and body.get("add_generation_prompt"):
        fault = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise build_bad_request(fault, "continue_final_message")
    text = "".join(f"\n<{_get_role(message)}>:{_get_content(message)}" for message in messages)
    if body.get("add_generation_prompt", True) and not continues:
        text += "\n<assistant>:"
    return array("I", tokenizer.encode(text))


def _get_role(message: object) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise build_bad_request("Each message needs a role.", "messages")
    return role


def _get_content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [_get_part_text(part) for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise build_bad_request("Only text parts are emulated.", "messages")
        return "\n".join(str(part) for part in parts)
    if not isinstance(content, str | None):
        raise build_bad_request("content must be a string or a list of parts.", "messages")
    return content or ""


def _get_part_text(part: object) -> object:
    if not isinstance(part, dict):
        return None
    return part.get("name" if part.get("type") == "tool_reference" else "text")


def _parse_max_tokens(body: dict[str, Any], chat: bool, prompt_len: int, max_model_len: int) -> int:
    limit = _parse_integer(body, "max_completion_tokens" if chat else "max_tokens", None)
    if limit is None:
        limit = _parse_integer(body, "max_tokens", None if chat else _DEFAULT_COMPLETION_TOKENS)
    if limit is not None and limit < 1:
        raise build_bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    if prompt_len >= max_model_len:
        raise build_bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt"
            f" contains {prompt_len} input tokens, which exceeds this limit even without any output"
            " tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if prompt_len + (limit or 1) > max_model_len:
        raise build_bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested"
            f" {limit or 1} output tokens and your prompt contains {prompt_len} input tokens,"
            f" for a total of {prompt_len + (limit or 1)} tokens."
            " Please reduce the length of the input prompt or the number of requested output"
            " tokens.",
            "input_tokens",
        )
    return limit if limit is not None else max_model_len - prompt_len


def _parse_integer(body: dict[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        fault = f"{name} must be a whole number of at least 0, got {str(value)[:40]}."
        raise build_bad_request(fault, name)
    return value


def _parse_interval(body: dict[str, Any]) -> int:
    interval = _parse_integer(body, "stream_interval", 1)
    if not interval:
        fault = f"stream_interval must be at least 1, got {interval}."
        raise build_bad_request(fault, "stream_interval")
    return interval


def _parse_usage_option(body: dict[str, Any], stream: bool, name: str) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        fault = "Stream options can only be defined when `stream=True`."
        raise build_bad_request(fault, "stream_options")
    return isinstance(options, dict) and bool(options.get(name))


def _parse_kv_transfer(
    body: dict[str, Any],
) -> tuple[bool, RemotePrefill | None, PrefixSource | None]:
    params = body.get("kv_transfer_params")
    if params is None:
        return False, None, None
    if not isinstance(params, dict):
        raise build_bad_request("kv_transfer_params must be an object.", "kv_transfer_params")
    handoff = _parse_handoff(params) if params.get("do_remote_prefill") else None
    source = params.get("prefix_source")
    return (
        bool(params.get("do_remote_decode")),
        handoff,
        _parse_source(source) if source is not None else None,
    )


def _parse_source(params: dict[str, Any]) -> PrefixSource:
    try:
        port = int(params["port"])
        if not 0 < port < 65536:
            raise ValueError(f"port {port}")
        return PrefixSource(str(params["engine_id"]), str(params["host"]), port)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        fault = f"prefix_source of kv_transfer_params is malformed: {error!r}"
        raise build_bad_request(fault, "kv_transfer_params") from error


def _parse_handoff(params: dict[str, Any]) -> RemotePrefill:
    try:
        groups: Iterable[Iterable[int]] = params["remote_block_ids"]
        (block_ids,) = groups
        port = int(params["remote_port"])
        if not 0 < port < 65536:
            raise ValueError(f"remote_port {port}")
        cached = params.get("remote_prefill_cached_tokens")
        return RemotePrefill(
            engine_id=str(params["remote_engine_id"]),
            request_id=str(params["remote_request_id"]),
            host=str(params["remote_host"]),
            port=port,
            block_ids=tuple(int(block) for block in block_ids),
            cached_tokens=cached if isinstance(cached, int) else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        fault = f"kv_transfer_params are malformed: {error!r}"
        raise build_bad_request(fault, "kv_transfer_params") from error
