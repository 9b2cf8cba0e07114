"""Scripts of fake engines that answer chats with reasoning, text and tool calls, as vLLM does."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Delta = dict[str, Any]
USAGE = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}


def call_delta(name: str | None, arguments: str, index: int = 0) -> Delta:
    """Of a tool call: its beginning with a name, or more arguments without."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    head = {"id": f"call-{index}", "type": "function"} if name else {}
    return {"tool_calls": [{"index": index, **head, "function": function}]}


def join_deltas(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message of a complete response."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key in ("content", "reasoning", "reasoning_content"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
            call |= {key: part[key] for key in ("id", "type") if key in part}
            function = part["function"]
            call["function"] |= {"name": function["name"]} if "name" in function else {}
            call["function"]["arguments"] += function["arguments"]
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def chat(
    choose: Callable[[dict[str, Any]], tuple[Sequence[Delta], str]], drop_after: int | None = None
):
    """A script: `choose` returns the deltas of the answer to a body, and its finish reason. The
    first stream breaks off after `drop_after` deltas."""
    drops = [] if drop_after is None else [drop_after]

    async def script(engine, request, writer) -> None:
        if request.is_prefill:
            engine.send_json(writer, engine.prefill_answer(request))
            return
        deltas, finish = choose(request.body)
        frame = {"id": "chatcmpl-a1", "created": 1_700_000_000, "model": "m"}
        if not request.body.get("stream"):
            choice = {"index": 0, "message": join_deltas(deltas), "finish_reason": finish}
            engine.send_json(writer, {**frame, "choices": [choice], "usage": USAGE})
            return
        engine.send_stream_head(writer)
        events = [{"delta": delta, "finish_reason": None} for delta in deltas]
        events[-1]["finish_reason"] = finish
        drop = drops.pop() if drops else None
        for number, choice in enumerate([{"delta": {"role": "assistant", "content": ""}}, *events]):
            if number == drop:
                await writer.drain()
                writer.transport.abort()
                return
            event = {**frame, "choices": [{"index": 0, **choice}]}
            engine.send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
        last = {**frame, "choices": [], "usage": USAGE}
        if request.body.get("stream_options", {}).get("include_usage"):
            engine.send_chunk(writer, b"data: " + json.dumps(last).encode() + b"\n\n")
        engine.send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return script


THINK = {"reasoning": "let me "}, {"reasoning": "see"}
SAY = {"content": "I will "}, {"content": "look."}
CALL = call_delta("weather", ""), call_delta(None, '{"city": '), call_delta(None, '"Ulm"}')


def answer_or_call(body: dict[str, Any]) -> tuple[Sequence[Delta], str]:
    """For `chat`: a thought, a text and a call; the answer once a tool has given its result."""
    if body["messages"][-1]["role"] == "tool":
        return ({"content": "It is "}, {"content": "sunny."}), "stop"
    return (*THINK, *SAY, *CALL), "tool_calls"
