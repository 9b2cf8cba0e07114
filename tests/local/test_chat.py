import json

import pytest

from cleave.local import chat
from cleave.local.chat import send_chat_request
from cleave.local.errors import ChatError

from tests.support.doubles import Answering

BODY = {"model": "m", "messages": []}


def stream(*events: object) -> bytes:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    body = "".join(f"data: {text}\n\n" for text in texts)
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n{body}".encode()


def piece(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


async def test_pieces_are_shown_as_they_come_and_counted_by_the_engine(serve: Answering) -> None:
    shown: list[str] = []
    url = await serve(stream(piece(""), piece("Hel"), piece("lo"), USAGE, "[DONE]"))
    answer = await send_chat_request(url, BODY, shown.append)
    assert shown == ["Hel", "lo"]
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("Hello", 7, 2)
    assert answer.ttft_ms > 0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (stream(piece("x"), USAGE), r"ended before \[DONE\]"),
        (stream(USAGE, "[DONE]"), "no text"),
        (stream({"error": {"message": "engine lost"}}), "engine lost"),
        (
            b'HTTP/1.1 503 X\r\nContent-Length: 35\r\n\r\n{"error": {"message": "no engine"}}',
            "status 503",
        ),
        (b"", "127.0.0.1"),
    ],
)
async def test_an_empty_answer_is_reported(serve: Answering, answer: bytes, complaint: str) -> None:
    with pytest.raises(ChatError, match=complaint):
        await send_chat_request(await serve(answer), BODY, lambda _: None)


async def test_a_time_out_without_words_is_named(
    monkeypatch: pytest.MonkeyPatch, serve: Answering
) -> None:
    async def time_out(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(chat, "_collect", time_out)
    with pytest.raises(ChatError, match=r"http://.*: TimeoutError"):
        await send_chat_request(await serve(stream()), BODY, lambda _: None)
