import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from cleave.traffic import prometheus
from cleave.traffic.recordings.history_error import HistoryError

END_S = 1_700_000_000.0
PROMPTS = {"10": "0", "20": "20", "50": "20", "100": "80", "+Inf": "100"}
OUTPUTS = {"10": "50", "20": "100", "+Inf": "100"}
RATES = [[END_S - 120, "2.5"], [END_S - 60, "NaN"], [END_S, "3.5"]]


def vector(buckets: dict[str, str]) -> list[dict]:
    """As Prometheus answers an instant query; the order of series is its own."""
    series = [{"metric": {"le": le}, "value": [END_S, n]} for le, n in buckets.items()]
    return series[::-1]


class Server:
    """Answers as Prometheus does; parts can be exchanged."""

    def __init__(self) -> None:
        self.prompts = vector(PROMPTS)
        self.outputs = vector(OUTPUTS)
        self.gateways: list[dict] = []
        """Prompts of gateways; their outputs are `outputs`."""
        self.rates: list[dict] = [{"metric": {}, "values": RATES}]
        self.raw: Callable[[], bytes] | None = None
        self.status = 200
        self.queries: list[dict[str, str]] = []

    def answer(self, path: str) -> bytes:
        if self.raw is not None:
            return self.raw()
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.queries.append({"path": parts.path, **query})
        if parts.path.endswith("/api/v1/query_range"):
            kind, result = "matrix", self.rates
        else:
            kind = "vector"
            prompts = self.gateways if "cleave_gateway" in query["query"] else self.prompts
            result = prompts if "prompt_tokens" in query["query"] else self.outputs
        data = {"resultType": kind, "result": result}
        return json.dumps({"status": "success", "data": data, "warnings": []}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    fake = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = fake.answer(self.path)
            self.send_response(fake.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    http.shutdown()
    thread.join()
    http.server_close()


def test_lengths_come_from_the_buckets(server) -> None:
    observed = prometheus.read_traffic(server.url, END_S, 3600)
    demand = observed.build_demand()
    drawn = demand.draw(20_000)
    assert drawn.prompt_tokens.min() >= 10
    assert drawn.prompt_tokens.max() == 100
    assert np.mean(drawn.prompt_tokens <= 20) == pytest.approx(0.2, abs=0.01)
    assert np.mean(drawn.prompt_tokens == 100) == pytest.approx(0.2, abs=0.01), "beyond all buckets"
    assert not np.any((drawn.prompt_tokens > 21) & (drawn.prompt_tokens < 50)), "an empty bucket"
    assert np.mean(drawn.output_tokens) == pytest.approx(10, abs=0.5)
    assert observed.num_requests == 100
    assert observed.share_beyond == pytest.approx(0.2)


def test_the_rate_over_time_leaves_gaps_of_the_recording_out(server) -> None:
    observed = prometheus.read_traffic(server.url, END_S, 3600)
    assert observed.times_s.tolist() == [END_S - 120, END_S]
    assert observed.rates.tolist() == [2.5, 3.5]
    assert observed.build_demand().rate == 3.0
    assert observed.build_demand(rate=9.0, burstiness=2.0).draw(500).rate == pytest.approx(
        9, rel=0.3
    )


def test_queries_cover_the_window_in_at_most_a_thousand_steps(server) -> None:
    prometheus.read_traffic(server.url + "/", END_S, 7 * 86400, 'my "model"')
    _, prompts, _, rates = server.queries
    chosen = '{model_name="my \\"model\\""}'
    assert prompts["query"] == (
        "sum by (le, model_name, instance) "
        f"(increase(vllm:request_prompt_tokens_bucket{chosen}[604800s]))"
    )
    assert float(prompts["time"]) == END_S
    assert rates["query"] == f"sum(rate(vllm:request_success_total{chosen}[605s]))"
    assert float(rates["end"]) - float(rates["start"]) == 604_800 - 605
    prometheus.read_traffic(server.url, END_S, 3600)
    assert server.queries[-1]["step"] == "60.0"


def build_series(lengths: list[int], bounds: list[int], **labels: str) -> list[dict]:
    """The histogram of one engine."""
    counts = {str(float(each)): str(sum(n <= each for n in lengths)) for each in bounds}
    series = vector({**counts, "+Inf": str(len(lengths))})
    return [{**each, "metric": {**each["metric"], **labels}} for each in series]


SHORT = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
LONG = [*SHORT, 5000, 10_000, 20_000, 50_000, 100_000]


def test_several_models_are_refused_by_name(server) -> None:
    server.prompts = build_series([300] * 1000, SHORT, model_name="chat", instance="a")
    server.prompts += build_series([9000] * 110, LONG, model_name="code", instance="b")
    line = fault(server)
    assert "several models: chat (1,000 requests), code (110 requests)" in line
    assert "choose one with --model" in line


def test_sums_of_different_buckets_are_refused(server) -> None:
    lengths = [300] * 1000 + [9000] * 110
    series = build_series(lengths, LONG)
    for each in series:
        if float(each["metric"]["le"]) in map(float, LONG[len(SHORT) :]):
            each["value"][1] = str(int(each["value"][1]) - 1000)
    server.prompts = series
    assert "has fewer requests in a larger bucket" in fault(server)
    assert "--model" in fault(server)


def test_engines_of_one_model_may_have_different_buckets(server) -> None:
    long = [int(1000 + 900 * at) for at in range(110)]
    for lengths, bounds, name in (([300] * 1000, SHORT, "a"), (long, LONG, "b")):
        found = build_series(lengths, bounds, model_name="m", instance=name)
        server.prompts = found if name == "a" else server.prompts + found
    server.outputs = build_series([50] * 1110, SHORT, model_name="m", instance="a")
    observed = prometheus.read_traffic(server.url, END_S, 3600)
    assert observed.num_requests == 1110
    drawn = observed.build_demand().draw(20_000).prompt_tokens
    assert np.mean(drawn) == pytest.approx(np.mean([300] * 1000 + long), rel=0.1)
    assert np.mean(drawn > 5000) == pytest.approx(sum(n > 5000 for n in long) / 1110, abs=0.01)


def test_both_engines_of_split_requests_count_them_once(server) -> None:
    lengths = [100, 400, 900, 1500] * 20
    generated = [30, 60, 150, 300] * 20
    server.prompts, server.outputs = [], []
    for name, outputs in (("prefill-0", [1] * 80), ("decode-0", generated)):
        labels = {"model_name": "m", "instance": name}
        server.prompts += build_series(lengths, SHORT, **labels)
        server.outputs += build_series(outputs, SHORT, **labels)
    observed = prometheus.read_traffic(server.url, END_S, 3600)
    assert observed.num_requests == 80
    assert observed.rates.tolist() == [1.25, 1.75], "half of what both count"
    assert observed.build_demand().draw(5000).output_tokens.mean() == pytest.approx(140, rel=0.15)
    (remark,) = observed.remarks
    assert remark.startswith("1 of 2 engines generate one token per request: as prefill engines")


def test_gateways_count_split_requests_once_and_no_canaries(server) -> None:
    for name in ("a", "b"):
        server.gateways += build_series([400] * 40, SHORT, model="m", instance=name)
    server.outputs = build_series([90] * 80, SHORT, model="m", instance="a")
    observed = prometheus.read_traffic(server.url, END_S, 3600, "m")
    assert observed.num_requests == 80
    assert observed.rates.tolist() == [2.5, 3.5], "of the gateways alone"
    assert observed.remarks == ("requests as Cleave's gateways count them",)
    prompts, outputs, rates = (each["query"] for each in server.queries)
    chosen = 'prompt_tokens_bucket{model="m"}'
    assert f"by (le, model, instance) (increase(cleave_gateway_request_{chosen}" in prompts
    assert 'cleave_gateway_request_output_tokens_bucket{model="m"}' in outputs
    assert 'rate(cleave_gateway_request_prompt_tokens_count{model="m"}[240s])' in rates


def test_sums_of_both_engines_are_doubted(server) -> None:
    server.outputs = build_series([1] * 50 + [60] * 50, SHORT)
    (remark,) = prometheus.read_traffic(server.url, END_S, 3600).remarks
    assert remark.startswith("50% of requests generated one token: where prefill engines are")


def test_a_path_before_the_api_is_kept(server) -> None:
    prometheus.read_traffic(server.url + "/prometheus/", END_S, 3600)
    assert server.queries[0]["path"] == "/prometheus/api/v1/query"


def fault(server: Server) -> str:
    with pytest.raises(HistoryError) as caught:
        prometheus.read_traffic(server.url.replace("//", "//me:secret@"), END_S, 3600)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_error_for_an_empty_recording_names_what_to_look_for(server) -> None:
    server.prompts = []
    assert "holds no vllm:request_prompt_tokens_bucket in these 3600 s" in fault(server)
    server.prompts = vector({"10": "0", "+Inf": "0"})
    assert "holds no vllm:request_prompt_tokens_bucket" in fault(server)
    server.prompts = vector({"10": "0", "+Inf": "NaN"})
    assert "holds no vllm:request_prompt_tokens_bucket" in fault(server)
    server.prompts = vector({"10": "0", "+Inf": "5"})
    assert "no finite bucket of vllm:request_prompt_tokens_bucket" in fault(server)
    server.prompts = vector({"+Inf": "5"})
    assert "no finite bucket" in fault(server)
    server.prompts, server.rates = vector(PROMPTS), []
    assert "holds no rate of vllm:request_success_total" in fault(server)


def test_answers_that_are_not_prometheus_are_reported(server) -> None:
    server.raw = lambda: b"<html>"
    assert "/api/v1/query answered 200, not as Prometheus does" in fault(server)
    server.raw = lambda: b'{"status": "success", "data": {"result": [{"value": [1, 2]}]}}'
    assert "not as Prometheus does" in fault(server)
    server.status, server.raw = 400, lambda: b'{"status": "error", "error": "parse error"}'
    assert fault(server).endswith("/api/v1/query answered 400: parse error")
    server.raw = lambda: b'{"status":"success","data":{"result":[{"metric":{},"value":[1,"2"]}]}}'
    assert "'None' is not a number" in fault(server) or "None is not a number" in fault(server)


def test_every_wait_is_bounded(server, monkeypatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr(prometheus, "TIMEOUT_S", 0.05)
    server.raw = lambda: b"" if stop.wait(5) else b"{}"
    assert "no response within 0.05 s" in fault(server)
    stop.set()


def test_an_endless_answer_is_cut(server, monkeypatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_RESPONSE_BYTES", 100)
    server.raw = lambda: b"x" * 200
    assert "the response is over 0 MiB" in fault(server)


@pytest.mark.parametrize("url", ["ftp://host", "prometheus:9090", "http://", "http://[::1"])
def test_an_invalid_address_is_reported(url) -> None:
    with pytest.raises(HistoryError, match="Prometheus: "):
        prometheus.read_traffic(url, END_S, 3600)


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(HistoryError, match=r"Prometheus at http://127\.0\.0\.1:1"):
        prometheus.read_traffic("http://127.0.0.1:1", END_S, 3600)


def test_a_window_shorter_than_a_step_is_refused() -> None:
    with pytest.raises(HistoryError, match="window 30 s: must be at least 60 s"):
        prometheus.read_traffic("http://127.0.0.1:1", END_S, 30)
