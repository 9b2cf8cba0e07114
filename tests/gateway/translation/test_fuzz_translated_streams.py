"""With any events of an engine, a translated stream ends, in little memory and short steps.

A relay and a client, fed as engines' connections feed them. Only the client is measured, in CPU
time, and a stream fails only if it is slow three times. For a long run:
FUZZ_INPUTS=10000 pytest tests/gateway/translation/test_fuzz_translated_streams.py --timeout=0
"""

import json
import os
import random
from collections.abc import Callable, Sequence

import pytest

from cleave.gateway.failover.transcript import Transcript
from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.errors import EVENT_TOO_LONG, GatewayError
from cleave.gateway.proxy.sse_relay import SseRelay, StreamLostError
from cleave.gateway.proxy.translated_client import FREE_BYTES, ROOM_BYTES, TranslatedClient
from cleave.gateway.translation.answer import MAX_EVENT_BYTES, MAX_TEXT_BYTES
from cleave.gateway.translation.messages_answer import MessagesAnswer
from cleave.gateway.translation.responses_answer import ResponsesAnswer
from cleave.gateway.translation.responses_tools import ToolName

from tests.gateway.proxy.test_translated_client import decode_chunks
from tests.support.loop_blocks import LIMIT_S, BlockRecorder, recorded_blocks

pytestmark = pytest.mark.interpreted

NUM_STREAMS = int(os.environ.get("FUZZ_INPUTS", "60"))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
FEED_BYTES = 4 << 10
MAX_GROWTH = 60
"""Of a stream: a call of 36 bytes becomes five events, and is repeated at the end."""
TOOLS = {"free": ToolName("free", is_free_text=True)}
ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
    "/v1/messages": ("message_stop", "error"),
}
NAMES = '"f"', '"free"', "null"
TEXTS = (
    '"a"', '" word"', '"\\u0001\\n"', '"\\ud800"', '"\\ud83d\\ude00"', '"é"', '""', "null", "7",
    '"{\\"input\\": \\"free\\"}"',
)  # fmt: skip
ODD = ("null", "{}", "[]", "-1", "1e999", "9" * 40, "9" * 5_000, '"x"', "true", "[" * 3_000, "[0,")
KEYS = (
    "id", "created", "model", "choices", "usage", "error", "delta", "content", "reasoning",
    "tool_calls", "index", "function", "name", "arguments", "finish_reason", "stop_reason", "x",
)  # fmt: skip


class Client:
    """Keeps what is written."""

    chunked = keep_alive = True
    blocked = False

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes | memoryview) -> None:
        self.pieces.append(bytes(data))

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces += pieces

    def end(self, reusable: bool) -> None: ...

    def drop(self) -> None: ...


def make_answer(path: str) -> MessagesAnswer | ResponsesAnswer:
    return MessagesAnswer() if path == "/v1/messages" else ResponsesAnswer({}, TOOLS)


def event(delta: str, rest: str = "") -> bytes:
    choice = f'{{"index":0,"delta":{delta},"finish_reason":null{rest}}}'
    return b'data: {"id":"chatcmpl-1","model":"m","choices":[%b]}\n\n' % choice.encode()


def say(text: str) -> bytes:
    return event(f'{{"content":{text}}}')


def call(*calls: str) -> bytes:
    return event(f'{{"tool_calls":[{",".join(calls)}]}}')


class Streams:
    """Random ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def build(self) -> bytes:
        rng, events = self._random, [event('{"role":"assistant","content":""}')]
        build = rng.choice((self._say, self._say, self._call, self._fill, self._spoil))
        for _ in range(rng.choice((1, 3, 40, 400))):
            events.append(build() if rng.random() < 0.97 else self._spoil())
            if sum(map(len, events)) > 1 << 20:
                break
        return b"".join(events) + rng.choice((DONE, DONE, DONE, b""))

    def _say(self) -> bytes:
        rng = self._random
        text = (
            rng.choice(TEXTS)
            if rng.random() < 0.9
            else '"%s"' % ("wörd\\n" * rng.randint(1, 9_000))
        )
        member = rng.choice(("content", "content", "reasoning", "reasoning_content"))
        return event(f'{{"{member}":{text}}}')

    def _call(self) -> bytes:
        rng = self._random
        calls = [
            f'{{"index":{rng.randint(0, 3)},"function":{{"name":{rng.choice(NAMES)},'
            f'"arguments":{rng.choice(TEXTS)}}}}}'
            for _ in range(rng.choice((1, 1, 2, 100, 128, 129)))
        ]  # fmt: skip
        return call(*calls)

    def _fill(self) -> bytes:
        rng = self._random
        size = rng.choice((1_000, 60_000, MAX_EVENT_BYTES - 300, MAX_EVENT_BYTES + 1))
        outer, unit = rng.choice((
            ('{"content":"%s"}', "ab\\u0041"), ('{"tool_calls":[%s{"index":0}]}', '{"index":0},'),
            ('{"tool_calls":[%s{}]}', "{},"), ("{%s\"x\":0}", '"tool_calls":[{"index":0}],'),
            ('{"x":[%s0]}', "[],"), ("{%s\"x\":0}", '"reasoning":"a",'),
            ('{},"x":0},%s{"delta":{}', "{},"), ('{}%s', ',"delta":{}'),
        ))  # fmt: skip
        return event(outer.replace("%s", unit * (size // len(unit))))

    def _spoil(self) -> bytes:
        rng = self._random
        if rng.random() < 0.3:
            return rng.choice((DONE, b": comment\n\n", b"data: {}\n\n", b"data:\n\n", b"x\n\n",
                b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n',
                b'data: {"error":{"message":"no","code":400}}\n\n'))  # fmt: skip
        data = event('{"content":"a","tool_calls":[{"index":0,"function":{"name":"f"}}]}').decode()
        key, value = rng.choice(KEYS), rng.choice(ODD)
        at = rng.choice([at for at, sign in enumerate(data) if sign == "{"]) + 1
        return f'{data[:at]}"{key}":{value},{data[at:]}'.encode()


def run(path: str, stream: bytes, measure: Callable[..., object]) -> tuple[bytes, int]:
    """(what the client gets, the most that was reserved), as a proxied request does it."""
    client, budget, most = Client(), BufferBudget(64 << 20), 0
    translated = TranslatedClient(client, make_answer(path), budget)
    transcript = Transcript(keeps_ids=False, keeps_text=False, num_choices=1)
    relay = SseRelay(HEAD, False, 0.0, transcript=transcript)

    def take(piece: bytes, is_last: bool) -> bool:
        try:
            try:
                measure(translated.write, relay.forward(piece, is_last))
            except StreamLostError as lost:
                measure(translated.write, lost.data)
                raise lost.error or EVENT_TOO_LONG from None
        except GatewayError as error:
            measure(translated.write, relay.build_error_end(error))
            return False
        return True

    for at in range(0, len(stream), FEED_BYTES):
        is_last = at + FEED_BYTES >= len(stream)
        goes_on = take(stream[at : at + FEED_BYTES], is_last)
        most = max(most, budget.used)
        if not goes_on:
            break
    measure(translated.end, True)
    assert budget.used == 0
    return b"".join(client.pieces), most


def read_events(answer: bytes) -> list[dict]:
    events = decode_chunks(answer.partition(b"\r\n\r\n")[2]).split(b"\n\n")
    return [json.loads(each.partition(b"\ndata: ")[2]) for each in events if each.startswith(b"e")]


def find_worst(path: str, stream: bytes, recorder: BlockRecorder) -> tuple[bytes, int]:
    """As `run`; fails if a step takes too long, each of three times."""
    for left in (2, 1, 0):
        recorder.forget()
        answer, most = run(path, stream, recorder.run)
        if recorder.worst.cpu_s <= LIMIT_S:
            break
        assert left, f"{recorder.worst}: {stream[:300]!r} ... {stream[-100:]!r}"
    return answer, most


@pytest.mark.parametrize("path", ENDS)
def test_any_stream_ends_in_short_steps(path: str) -> None:
    streams, ends = Streams(seed=1), set()
    with recorded_blocks() as recorder:
        for _ in range(NUM_STREAMS):
            stream = streams.build()
            answer, most = find_worst(path, stream, recorder)
            assert most <= MAX_TEXT_BYTES + MAX_EVENT_BYTES + ROOM_BYTES
            assert len(answer) <= MAX_GROWTH * len(stream) + (1 << 16), stream[:500]
            events = read_events(answer)
            last = [each["type"] for each in events if each["type"] in ENDS[path]]
            assert last == [events[-1]["type"]], stream[-500:]
            ends |= {*last}
            if path == "/v1/responses":
                assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert len(ends) >= 2, "some streams are complete, some fail"


@pytest.mark.parametrize("text", ["é\\n" * 333, "\\u0001" * 160])
def test_a_long_answer_is_repeated_from_what_was_sent(text: str) -> None:
    """Reserved while it grows; its last events are written at once, and none takes long."""
    num = MAX_TEXT_BYTES // (len(text.encode()) + 2) - 10
    stream = say(f'"{text}"') * num + DONE
    with recorded_blocks() as recorder:
        answer, most = find_worst("/v1/responses", stream, recorder)
    assert MAX_TEXT_BYTES - 3 * ROOM_BYTES < most + FREE_BYTES < MAX_TEXT_BYTES + ROOM_BYTES
    events, whole = read_events(answer), json.loads(f'"{text}"') * num
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == whole
    done = [each for each in events if each["type"] == "response.output_text.done"]
    assert [each["text"] for each in done] == [whole]


@pytest.mark.parametrize("part", [
    say('"%s"' % ("a" * 60_000)),
    event('{"reasoning":"a","content":"b"}'),
    call('{"index":0,"function":{"name":"free","arguments":"%s"}}' % ("a" * 60_000)),
], ids=["text", "items", "free text"])  # fmt: skip
def test_an_answer_that_is_too_long_to_repeat_fails(part: bytes) -> None:
    with recorded_blocks() as recorder:
        answer, _ = find_worst("/v1/responses", part * 1_000 + DONE, recorder)
    last = read_events(answer)[-1]
    assert last["type"] == "response.failed"
    assert "above 2 MiB" in last["response"]["error"]["message"]


@pytest.mark.parametrize("path", ENDS)
@pytest.mark.parametrize(("slow", "message"), [
    (say('"%s"' % ("a" * 262_200)), "above 256 KiB"),
    (call(*['{"index":0,"function":{"name":"f"}}'] * 129), "cannot be translated"),
    (say('"a","x":' + "[" * 3_000 + "]" * 3_000), "cannot be translated"),
])  # fmt: skip
def test_an_event_that_would_take_long_ends_the_stream(
    path: str, slow: bytes, message: str
) -> None:
    with recorded_blocks() as recorder:
        answer, _ = find_worst(path, slow + say('"a"') + DONE, recorder)
    last = read_events(answer)[-1]
    error = last["error"] if path == "/v1/messages" else last["response"]["error"]
    assert message in error["message"]


def test_arguments_of_a_complete_call_are_read_in_a_short_step() -> None:
    arguments = json.dumps({f"{n:x}": 0 for n in range(40_000)})
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    body = json.dumps({"choices": [{"message": {"tool_calls": calls}}]}).encode()
    with recorded_blocks() as recorder:
        for left in (2, 1, 0):
            recorder.forget()
            message = recorder.run(MessagesAnswer().build_body, body)
            if recorder.worst.cpu_s <= LIMIT_S:
                break
            assert left, str(recorder.worst)
    assert len(json.loads(message)["content"][0]["input"]) == 40_000
