"""The gateway's CPU time for a token of a translated stream, beside that of the relay; seconds.

`python benchmarks/gateway/translation.py`. No sockets: bytes in, bytes out. Not compiled; in images
the relay is, and the translations are not.
"""

import json
import time
from collections.abc import Callable, Sequence

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.proxy.sse_relay import SseRelay
from cleave.gateway.proxy.translated_client import TranslatedClient
from cleave.gateway.translation.messages_answer import MessagesAnswer
from cleave.gateway.translation.responses_answer import ResponsesAnswer

TOKENS = 2_000
ROUNDS = 9


class Client:
    """Takes bytes."""

    chunked = keep_alive = True
    blocked = False

    def write(self, data: bytes) -> None:
        """Take them."""

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Take them."""

    def end(self, reusable: bool) -> None:
        """Nothing follows."""

    def drop(self) -> None:
        """Nothing follows."""


def build_event(number: int) -> bytes:
    """As vLLM writes it, with the token's id."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    event = {**frame, "choices": [{**choice, "token_ids": [number]}]}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def measure(make: Callable[[], Callable[[bytes], object]]) -> float:
    """Microseconds of CPU per token, the least of some rounds."""
    events = list(map(build_event, range(TOKENS)))
    least = float("inf")
    for _ in range(ROUNDS):
        take = make()
        started_at = time.process_time()
        for event in events:
            take(event)
        least = min(least, time.process_time() - started_at)
    return least / TOKENS * 1e6


def main() -> None:
    """Measure and print."""

    def relay(chunked: bool) -> Callable[[bytes], object]:
        stream = SseRelay(b"", chunked, 0.0, True)
        return lambda event: stream.forward(event, False)

    def translate(answer: MessagesAnswer | ResponsesAnswer) -> Callable[[bytes], object]:
        client = TranslatedClient(Client(), answer, BufferBudget(64 << 20))
        client.write(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n")
        return client.write

    print(f"relay                {measure(lambda: relay(True)):5.2f} us")
    print(f"+ /v1/messages       {measure(lambda: translate(MessagesAnswer())):5.2f} us")
    print(f"+ /v1/responses      {measure(lambda: translate(ResponsesAnswer({}, {}))):5.2f} us")


if __name__ == "__main__":
    main()
