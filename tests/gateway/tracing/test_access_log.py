"""The access log: one line for each request, and never a word of what was said."""

import json
import logging
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from cleave.gateway.tracing.access_log import ACCESS_LOGGER
from cleave.logs import JsonFormatter, TextFormatter

PROMPT = "MARKER-PROMPT"
KEY = "MARKER-KEY-OF-A-CLIENT"
ASK = {"model": "m", "prompt": PROMPT, "max_tokens": 3}
STREAM = ASK | {"stream": True}
PAIR = {"p": "prefill", "d": "decode"}


@pytest.fixture
def lines(caplog):
    """The lines so far, as their fields."""
    caplog.set_level(logging.DEBUG)

    def read() -> list[dict]:
        records = [record for record in caplog.records if record.name == ACCESS_LOGGER]
        return [json.loads(JsonFormatter().format(record)) for record in records]

    return read


async def test_a_request_is_a_line(make_stage, lines) -> None:
    stage = await make_stage(PAIR, access_log=True)
    await stage.ask(STREAM, x_request_id="r-1")
    await stage.until_idle()
    (line,) = lines()
    assert line["message"] == "POST /v1/completions 200"
    assert (line["request_id"], line["model"], line["outcome"]) == ("r-1", "m", "ok")
    assert (line["prefill"], line["decode"], line["reason"]) == ("p", "d", "disaggregated")
    assert (line["prompt_tokens"], line["output_tokens"], line["attempts"]) == (7, 3, 1)
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    # What output lengths are learnt from: "MARKER-PROMPT" in quotes, four bytes a token.
    assert (line["estimated_prompt_tokens"], line["max_tokens"]) == (4, 3)
    assert "error" not in line


async def test_it_is_off_by_default(pair, lines) -> None:
    await pair.ask(STREAM)
    await pair.ask({}, path="/nothing")
    assert lines() == []


async def test_a_request_that_reached_no_engine_is_logged_too(make_stage, lines) -> None:
    stage = await make_stage(PAIR, access_log=True)
    await stage.ask(path="/v1/models")
    await stage.ask({"model": 1, "prompt": PROMPT})
    await stage.ask({}, path="/v1/unknown")
    client = await stage.connect()
    client.writer.write(b"not HTTP at all\r\n\r\n")
    await client.read()
    logged = [(line["message"], line["outcome"]) for line in lines()]
    assert logged == [
        ("GET /v1/models 200", "ok"),
        ("POST /v1/completions 400", "refused"),
        ("POST - 404", "refused"),
        ("- - 400", "refused"),
    ]


async def test_probes_and_scrapes_are_no_lines(make_stage, lines) -> None:
    stage = await make_stage(PAIR, access_log=True)
    await stage.ask(path="/health")
    await stage.ask(path="/metrics")
    assert lines() == []


async def test_a_failure_is_logged_with_the_clients_error(make_stage, lines) -> None:
    stage = await make_stage({"x": "mixed"}, access_log=True)

    async def fail(engine, request, writer):
        engine.send_json(writer, {"error": PROMPT}, status=500)

    stage.engines["x"].script = fail
    answer = await stage.ask(ASK)
    (line,) = lines()
    assert (line["status"], line["error"]) == (answer.status, "engine_error")
    assert line["outcome"] == "failed"
    assert line["attempts"] > 1


async def quote(engine, request, writer) -> None:
    """Refuses, and quotes the request."""
    engine.send_json(writer, {"error": {"message": request.raw.decode()}}, status=400)


async def break_down(engine, request, writer) -> None:
    engine.send_json(writer, {"error": {"message": request.raw.decode()}}, status=500)


async def break_off(engine, request, writer) -> None:
    engine.send_stream_head(writer)
    engine.send_chunk(writer, engine.event(PROMPT))
    await writer.drain()
    writer.transport.abort()


async def garble(engine, request, writer) -> None:
    writer.write(request.raw + b"\r\n\r\n")


async def garble_handoff(engine, request, writer) -> None:
    params = {"remote_engine_id": PROMPT}
    engine.send_json(writer, {"prompt": PROMPT, "kv_transfer_params": params})


@pytest.mark.parametrize("script", [None, quote, break_down, break_off, garble, garble_handoff])
async def test_no_log_contains_prompts_keys_or_bodies(make_stage, caplog, tmp_path, script) -> None:
    caplog.set_level(logging.DEBUG)
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    stage = await make_stage(PAIR, access_log=True, api_keys=keys)
    for engine in stage.engines.values():
        engine.script = script
    header = {"authorization": f"Bearer {KEY}"}
    for body in (
        ASK,
        STREAM,
        ASK | {"model": PROMPT},
        ASK | {"max_tokens": PROMPT},
        PROMPT.encode(),
    ):
        await stage.ask(body, **header)
    await stage.ask(ASK, authorization=f"Bearer wrong-{KEY}")
    await stage.ask({}, path=f"/v1/{KEY}", **header)
    await stage.ask(path=f"/v1/models/{PROMPT}?key={KEY}", **header)
    await stage.ask({"model": "m", "input": PROMPT}, path="/v1/embeddings", **header)
    client = await stage.connect()
    client.writer.write(f"POST {PROMPT} {KEY}\r\n\r\n".encode())
    await client.read()
    keys.write_text(f"sha256:{KEY}")
    stage.gateway._api_keys_file._file_version = None
    stage.gateway._api_keys_file.refresh()
    await stage.until_idle()
    assert len([record for record in caplog.records if record.name == ACCESS_LOGGER]) == 10
    for record in caplog.records:
        for form in (JsonFormatter(), TextFormatter()):
            line = form.format(record)
            assert PROMPT not in line
            assert KEY not in line


def test_lines_of_a_gateway_are_json_where_the_environment_says_so() -> None:
    command = [sys.executable, "-m", "cleave.gateway.main", "--port", "0", "--agents", ""]
    environment = os.environ | {"CLEAVE_LOG_FORMAT": "json"}
    with subprocess.Popen(
        [*command, "--access-log"], env=environment, stderr=subprocess.PIPE, text=True
    ) as gateway:
        try:
            messages = (json.loads(line)["message"] for line in gateway.stderr)
            listening = next(each for each in messages if each.startswith("listening on "))
            url = listening.removeprefix("listening on ")
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"{url}/v1/completions", json.dumps(ASK).encode(), 10)
            gateway.send_signal(signal.SIGTERM)
            lines = [json.loads(line) for line in gateway.stderr]
            assert gateway.wait(15) == 0
        finally:
            gateway.kill()
    (access,) = [line for line in lines if line["logger"] == ACCESS_LOGGER]
    assert (access["status"], access["outcome"]) == (503, "unavailable")
