"""Traces as a collector gets them: the tree of a request, what is sampled, and what goes wrong."""

import asyncio
import logging
import socket
import subprocess
import sys

import pytest

from cleave.gateway.config import GatewayConfig
from cleave.gateway.main import main
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.gateway.tracing import otel_exporter, recorder
from cleave.gateway.tracing.request_record import TracingError
from cleave.rpc.v1 import agent_pb2

from tests.support.otel_collector import ERROR, read, serve_grpc, serve_http

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True, "temperature": 0}
PAIR = {"p": "prefill", "d": "decode"}
TRACE, CLIENT = 0xABC, 0xDEF
TRACEPARENT = f"00-{TRACE:032x}-{CLIENT:016x}-01"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(otel_exporter, "DELAY_MS", 20.0)


@pytest.fixture
def collector():
    with serve_grpc() as (collector, url):
        yield collector, url


@pytest.fixture
def make_traced(make_stage, collector):
    """Stages that trace everything to a collector by default."""

    async def make(roles: dict[str, str], **options: object):
        stage = await make_stage(
            roles, **{"otlp_endpoint": collector[1], "trace_sample_ratio": 1.0, **options}
        )
        return stage, collector[0]

    return make


async def wait_until_exported(stage, collector, num_requests: int = 1) -> None:
    def is_exported() -> bool:
        servers = [span for span in collector.spans if span.name.startswith("POST")]
        return len(servers) == num_requests

    await stage.until(is_exported, "the spans of all requests have come")


async def test_a_split_stream_is_one_tree_from_the_client_to_both_engines(make_traced) -> None:
    stage, collector = await make_traced(PAIR, trace_sample_ratio=0.0)
    answer = await stage.ask(STREAM, traceparent=TRACEPARENT, x_request_id="mine")
    assert answer.status == 200
    await wait_until_exported(stage, collector)
    server, attempt = collector.only("POST /v1/completions"), collector.only("attempt")
    prefill, decode = collector.only("prefill"), collector.only("decode")
    assert {span.trace_id for span in collector.spans} == {TRACE.to_bytes(16)}
    assert server.parent_span_id == CLIENT.to_bytes(8)
    assert collector.children(server) == ["attempt"]
    assert collector.children(attempt) == ["prefill", "decode"]
    assert collector.children(prefill) == []
    assert collector.children(decode) == ["kv_transfer"]
    assert not any(span.status.code for span in collector.spans)
    server_fields = read(server)
    assert server_fields["http.response.status_code"] == 200
    assert server_fields["gen_ai.operation.name"] == "text_completion"
    assert server_fields["gen_ai.request.model"] == "m"
    assert (
        server_fields["gen_ai.usage.input_tokens"],
        server_fields["gen_ai.usage.output_tokens"],
    ) == (7, 3)
    assert (server_fields["cleave.request_id"], server_fields["cleave.outcome"]) == ("mine", "ok")
    assert server_fields["gen_ai.response.time_to_first_chunk"] > 0
    assert [event.name for event in server.events] == ["first_token"]
    assert read(attempt)["cleave.dispatch.reason"] == "disaggregated"
    assert read(prefill)["cleave.instance"] == "p"
    assert read(prefill)["cleave.handoff.blocks"] == 3
    assert read(decode)["cleave.instance"] == "d"
    assert collector.resource["service.name"] == "cleave-gateway"


async def test_spans_lie_within_their_parents(make_traced) -> None:
    stage, collector = await make_traced(PAIR)
    await stage.ask(STREAM)
    await wait_until_exported(stage, collector)
    spans = {span.span_id: span for span in collector.spans}
    for span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        parent = spans.get(span.parent_span_id)
        if parent is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano


async def test_engines_hear_of_the_span_that_calls_them(make_traced) -> None:
    stage, collector = await make_traced(PAIR)
    await stage.ask(STREAM)
    await wait_until_exported(stage, collector)
    for phase, name in (("prefill", "p"), ("decode", "d")):
        span, (request,) = collector.only(phase), stage.engines[name].requests
        expected_header = f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
        assert request.headers["traceparent"] == expected_header


@pytest.fixture
def make_ahead(make_traced):
    """Traced stages where the KV of every prompt is followed."""

    async def make(roles: dict[str, str]):
        stage, collector = await make_traced(roles, ahead_from_tokens=1)
        for engine in stage.engines.values():
            stage.state(engine, kv_port=5601, kv_block_size=16)
            load = agent_pb2.LoadReport(boot_id=engine.boot_id, kv_blocks_free=100, sampled_ns=1)
            event = agent_pb2.WatchEvent(load=load)
            stage.context.router.registry.on_event(engine.name, event, 1e12)
        return stage, collector

    return make


async def test_engines_called_at_once_are_two_legs_of_one_attempt(make_ahead) -> None:
    stage, collector = await make_ahead(PAIR)
    await stage.ask(STREAM)
    await wait_until_exported(stage, collector)
    assert collector.children(collector.only("attempt")) == ["prefill", "decode"]
    for phase, name in (("prefill", "p"), ("decode", "d")):
        span, (request,) = collector.only(phase), stage.engines[name].requests
        assert read(span)["cleave.instance"] == name
        assert request.headers["traceparent"].split("-")[2] == span.span_id.hex()


async def test_of_two_legs_at_once_the_one_that_failed_says_so(make_ahead) -> None:
    stage, collector = await make_ahead({"p": "prefill", "q": "prefill", "d": "decode"})
    hold = asyncio.Event()

    async def fail(engine, request, writer):
        engine.send_json(writer, {"error": "boom"}, status=500)

    async def follow(engine, request, writer):
        # As one does whose prompt does not come; the second time it does.
        if len(engine.requests) == 1:
            await hold.wait()
        await engine.answer(request, writer)

    stage.engines["p"].script, stage.engines["d"].script = fail, follow
    assert (await stage.ask(STREAM)).status == 200
    hold.set()
    await wait_until_exported(stage, collector)
    first, _ = collector.find("attempt")
    assert "instance p answered with status 500" in first.status.message
    legs = [*collector.find("prefill"), *collector.find("decode")]
    failed = [span for span in legs if span.status.code == ERROR]
    assert [(span.name, read(span)["cleave.instance"]) for span in failed] == [("prefill", "p")]
    assert read(failed[0])["error.type"] == "status"


async def test_a_retry_is_a_second_attempt_and_the_first_says_what_failed(make_traced) -> None:
    stage, collector = await make_traced({"p1": "prefill", "p2": "prefill", "d": "decode"})

    async def fail(engine, request, writer):
        engine.send_json(writer, {"error": "boom"}, status=500)

    stage.engines["p1"].script = fail
    assert (await stage.ask(ASK)).status == 200
    await wait_until_exported(stage, collector)
    first, second = collector.find("attempt")
    assert first.status.code == ERROR
    assert read(first)["error.type"] == "status"
    assert "instance p1 answered with status 500" in first.status.message
    assert collector.children(first) == ["prefill"]
    assert not second.status.code
    assert read(second)["cleave.recovery"] == "again"
    assert collector.children(second) == ["prefill", "decode"]
    assert collector.only("POST /v1/completions").status.code != ERROR


async def test_a_stream_that_goes_on_elsewhere_says_how(make_traced) -> None:
    stage, collector = await make_traced({"d1": "mixed", "d2": "mixed"})

    async def cut(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, engine.event("one"))
        await writer.drain()
        writer.transport.abort()

    stage.engines["d1"].script = cut
    answer = await stage.ask(STREAM)
    assert answer.status == 200
    assert answer.events[-1] == b"data: [DONE]"
    await wait_until_exported(stage, collector)
    first, second = collector.find("attempt")
    assert read(first)["error.type"] == "lost"
    assert read(second)["cleave.recovery"] == "replayed"
    assert collector.children(second) == ["whole"]
    lost, resumed = collector.find("whole")
    assert (read(lost)["cleave.instance"], read(resumed)["cleave.instance"]) == ("d1", "d2")


async def test_a_stream_that_is_continued_is_one_trace_over_both_pairs(
    make_fleet, collector
) -> None:
    roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    stage, engines = await make_fleet(roles, otlp_endpoint=collector[1], trace_sample_ratio=1.0)
    engines["d1"].engine.faults.drop = 5
    assert (await stage.ask(STREAM | {"max_tokens": 12, "ignore_eos": True})).status == 200
    await wait_until_exported(stage, collector[0])
    attempts = [read(span) for span in collector[0].find("attempt")]
    assert [each.get("cleave.recovery") for each in attempts] == [None, "continued"]
    assert [each["cleave.decode.instance"] for each in attempts] == ["d1", "d2"]
    assert len(collector[0].find("kv_transfer")) == 2
    server = collector[0].only("POST /v1/completions")
    assert read(server)["gen_ai.usage.output_tokens"] == 12


async def test_what_no_engine_can_answer_is_an_error_of_the_server(make_traced) -> None:
    stage, collector = await make_traced({"x": "mixed"})

    async def fail(engine, request, writer):
        writer.transport.abort()

    stage.engines["x"].script = fail
    answer = await stage.ask(ASK)
    assert answer.status >= 500
    await wait_until_exported(stage, collector)
    server = collector.only("POST /v1/completions")
    assert server.status.code == ERROR
    assert read(server)["http.response.status_code"] == answer.status


async def test_a_client_that_leaves_is_no_error(make_traced) -> None:
    stage, collector = await make_traced({"x": "mixed"})

    async def hang(engine, request, writer):
        await asyncio.sleep(600)

    stage.engines["x"].script = hang
    client = await stage.connect()
    client.send(ASK)
    await stage.until(lambda: bool(stage.engines["x"].requests), "it is asked")
    client.close()
    await wait_until_exported(stage, collector)
    server = collector.only("POST /v1/completions")
    assert (server.status.code, read(server)["cleave.outcome"]) == (0, "cancelled")


@pytest.mark.parametrize(
    ("share", "headers"),
    [(0.0, {}), (1.0, {"traceparent": TRACEPARENT[:-1] + "0"})],
    ids=["none", "the client says no"],
)
async def test_unsampled_spans_are_not_exported_and_engines_get_the_flag(
    make_traced, share, headers
) -> None:
    stage, collector = await make_traced(PAIR, trace_sample_ratio=share)
    for _ in range(3):
        assert (await stage.ask(STREAM, **headers)).status == 200
    attributes = [
        request.headers["traceparent"] for e in stage.engines.values() for request in e.requests
    ]
    assert len(attributes) == 6
    assert all(each.endswith("-00") for each in attributes)
    await stage.gateway.stop()
    assert collector.spans == []
    assert stage.context.metrics.spans == {"exported": 0, "failed": 0, "dropped": 0}


async def test_engines_hear_nothing_of_traces_without_the_option(pair) -> None:
    await pair.ask(STREAM, traceparent=TRACEPARENT)
    seen = [request.headers for e in pair.engines.values() for request in e.requests]
    assert len(seen) == 2
    assert not any("traceparent" in headers for headers in seen)


async def test_the_end_sends_what_waits(make_traced, monkeypatch) -> None:
    monkeypatch.setattr(otel_exporter, "DELAY_MS", 600_000.0)
    stage, collector = await make_traced(PAIR)
    await stage.ask(ASK)
    await stage.gateway.stop()
    assert len(collector.find("POST /v1/completions")) == 1
    assert stage.context.metrics.spans == {"exported": 4, "failed": 0, "dropped": 0}


async def test_traces_go_over_http_where_the_environment_says_so(make_stage, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with serve_http() as (collector, url):
        stage = await make_stage(PAIR, otlp_endpoint=url, trace_sample_ratio=1.0)
        await stage.ask(ASK)
        await stage.gateway.stop()
    assert len(collector.spans) == 4


async def test_the_environment_alone_says_where_traces_go(
    make_stage, collector, monkeypatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[1])
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    stage = await make_stage(PAIR, otlp_endpoint="", trace_sample_ratio=1.0)
    await stage.ask(ASK)
    await stage.gateway.stop()
    assert len(collector[0].spans) == 4
    assert collector[0].resource["service.name"] == "front"


async def test_a_dead_collector_costs_spans_and_one_line_and_nothing_else(
    make_stage, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.2)
    with socket.socket() as closed:
        # Bound and not listening: connections are refused.
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.1")
        stage = await make_stage(PAIR, otlp_endpoint=url, trace_sample_ratio=1.0)
        counts = stage.context.metrics.spans
        for number in range(1, 4):
            assert (await stage.ask(STREAM)).status == 200
            await stage.until(lambda: counts["failed"] >= 5 * number, "they are given up")  # noqa: B023
        await stage.gateway.stop()
    assert counts == {"exported": 0, "failed": 15, "dropped": 0}
    assert len([r for r in caplog.records if "traces cannot be exported" in r.message]) == 1
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert logging.getLogger("opentelemetry").level == logging.CRITICAL


async def test_a_collector_that_hangs_ends_neither_requests_nor_the_gateway(
    make_stage, monkeypatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.1)
    monkeypatch.setattr(otel_exporter, "QUEUE_SPANS", 12)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        stage = await make_stage(PAIR, otlp_endpoint=url, trace_sample_ratio=1.0)
        for _ in range(5):
            assert (await stage.ask(STREAM)).status == 200
        # Two requests of five spans wait; a third would be too much.
        assert stage.context.metrics.spans["dropped"] == 15
        await stage.gateway.stop()


async def test_a_fault_of_the_library_is_none_of_the_clients(make_traced, monkeypatch) -> None:
    stage, collector = await make_traced(PAIR)

    def fail(*_: object) -> None:
        raise TypeError("of the library")

    monkeypatch.setattr(otel_exporter.OtelExporter, "_emit_span", fail)
    client = await stage.connect()
    for body in (ASK, STREAM, ASK):
        assert (await client.ask(body)).status == 200
    await stage.until_idle()
    assert collector.spans == []


async def test_what_becomes_of_spans_is_a_metric(make_traced) -> None:
    stage, _ = await make_traced(PAIR)
    await stage.ask(ASK)
    counts = stage.context.metrics.spans
    await stage.until(lambda: counts["exported"] == 4, "they are sent")
    page = (await stage.ask(path="/metrics")).body.decode()
    assert 'cleave_gateway_spans_total{result="exported"} 4.0' in page


@pytest.mark.parametrize(
    "url", ["collector:4317", "ftp://collector", "http://", "http://[", "4317"]
)
def test_an_endpoint_that_is_no_url_is_refused_in_one_line(url) -> None:
    with pytest.raises(TracingError, match="--otlp-endpoint must be a URL") as refused:
        recorder.make_recorder(GatewayConfig(agents="", otlp_endpoint=url), GatewayMetrics())
    assert "\n" not in str(refused.value)


def test_an_unknown_protocol_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(TracingError, match="must be grpc or http/protobuf"):
        recorder.make_recorder(
            GatewayConfig(agents="", otlp_endpoint="http://x:4318"), GatewayMetrics()
        )


def test_without_the_library_the_option_is_refused_and_the_environment_only_warns(
    monkeypatch, caplog
) -> None:
    monkeypatch.delitem(sys.modules, "cleave.gateway.tracing.otel_exporter")
    monkeypatch.delattr("cleave.gateway.tracing.otel_exporter")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match="need the extra otel: make setup"):
        recorder.make_recorder(
            GatewayConfig(agents="", otlp_endpoint="http://x:4317"), GatewayMetrics()
        )
    assert (
        recorder.make_recorder(GatewayConfig(agents="", otlp_endpoint=""), GatewayMetrics()) is None
    )
    assert "tracing is off" in caplog.text


def test_a_gateway_that_traces_nothing_imports_nothing_for_it() -> None:
    loaded = "import sys, cleave.gateway.main; print([m for m in sys.modules if 'telemetry' in m])"
    completed = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


@pytest.mark.parametrize("share", ["2", "-0.1", "nan", "much"])
def test_a_share_that_is_none_is_bad_usage(share, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--agents", "", "--trace-share", share])
    assert ended.value.code == 2
    assert "--trace-share" in capsys.readouterr().err


def test_an_endpoint_that_is_none_ends_a_gateway_with_2(caplog) -> None:
    assert main(["--agents", "", "--port", "0", "--otlp-endpoint", "collector"]) == 2
    assert "--otlp-endpoint must be a URL" in caplog.text
