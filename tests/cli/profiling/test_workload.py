import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from cleave.api.workload import Workload
from cleave.cli.main import app
from cleave.traffic import history, prometheus, published
from cleave.traffic.prometheus import PrometheusTraffic
from cleave.traffic.recordings.history_error import HistoryError
from cleave.traffic.workload import Quantiles


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two kinds of requests, which no log-normal distribution describes."""
    file = tmp_path / "requests.csv"
    trace = published.get_workload("humaneval").build_demand(rate=4).draw(2000)
    trace.prompt_tokens[::2] = 4000
    history.write_trace(file, trace)
    return file


def run(cli: CliRunner, *arguments: str | Path) -> Result:
    return cli.invoke(app, ["workload", *map(str, arguments)])


def block(result: Result) -> dict:
    """The printed block, as it stands in a manifest."""
    assert result.exit_code == 0, result.output
    spec = yaml.safe_load(result.stdout)["workload"]
    Workload.model_validate_json(json.dumps(spec), by_alias=True, by_name=False)
    return spec


def test_a_published_workload_becomes_a_block_to_paste(cli: CliRunner) -> None:
    spec = block(run(cli, "humaneval", "--rate", "20", "-o", "yaml"))
    assert spec["rate"] == 20
    assert spec["promptTokens"]["mean"] == pytest.approx(171.3, rel=0.02)
    assert spec["outputTokens"]["p90"] == pytest.approx(1.8 * 98.2, rel=0.03)


def test_what_is_assumed_of_it_stands_above_the_block(cli: CliRunner) -> None:
    result = run(cli, "sharegpt", "-o", "yaml")
    assert "# from DistServe (OSDI 2024)" in result.stdout
    assert "# assumed: log-normal lengths" in result.stdout


def test_a_recording_that_distributions_do_not_describe_is_to_be_replayed(
    cli: CliRunner, recording: Path
) -> None:
    result = run(cli, recording, "-o", "yaml")
    assert block(result) == {"trace": {"path": str(recording)}}
    assert "# replay the trace rather than its fit: prompt lengths are not" in result.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--fit"], {"rate": pytest.approx(4, rel=0.1), "burstiness": pytest.approx(1, rel=0.1)}),
        (["--rate", "9"], {"rate": 9.0}),
        (["--burstiness", "3"], {"burstiness": 3.0}),
    ],
)
def test_distributions_are_printed_on_request(
    cli: CliRunner, recording: Path, options: list[str], expected: dict
) -> None:
    spec = block(run(cli, recording, "-o", "yaml", *options))
    assert "trace" not in spec
    assert {name: spec[name] for name in expected} == expected


def test_json_carries_the_diagnosis_beside_the_block(cli: CliRunner, recording: Path) -> None:
    answer = json.loads(run(cli, recording, "-o", "json").stdout)
    assert answer["workload"] == {"trace": {"path": str(recording)}}
    assert answer["diagnosis"]["numRequests"] == 2000
    assert answer["diagnosis"]["promptsAbove"][1] == [2048, 0.5]
    assert answer["diagnosis"]["arrivals"]["rate"] == pytest.approx(4, rel=0.1)


def test_the_table_shows_figures_a_histogram_and_the_block(cli: CliRunner, recording: Path) -> None:
    result = run(cli, recording)
    assert result.exit_code == 0
    assert "2,000 requests in" in result.stdout
    (row,) = (line for line in result.stdout.splitlines() if line.strip().startswith("2,048"))
    assert row.split() == ["2,048", "█" * row.count("█"), "50.0%"]
    assert row.count("█") > 10
    assert f"path: {recording}" in result.stdout


def test_more_requests_of_a_recording_can_be_drawn(
    cli: CliRunner, recording: Path, tmp_path: Path
) -> None:
    drawn = [tmp_path / f"{name}.csv" for name in "abc"]
    for file, seed in zip(drawn, (7, 7, 8), strict=True):
        options = ("--sample", "5000", "--rate", "12", "--seed", str(seed), "-O", file)
        result = run(cli, recording, *options)
        assert result.exit_code == 0
        assert "5000 requests similar to" in result.stdout
    assert drawn[0].read_text() == drawn[1].read_text() != drawn[2].read_text()
    trace = history.read_trace(drawn[0])
    assert len(trace) == 5000
    assert trace.rate == pytest.approx(12, rel=0.1)
    assert np.mean(trace.prompt_tokens == 4000) == pytest.approx(0.5, abs=0.05)


def test_traffic_of_a_prometheus_server_is_described(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = Quantiles((0, 0.5, 1), (10, 100, 2000))
    rates = np.array([1.0, 5.0])
    queries = []

    def read(*arguments: object) -> PrometheusTraffic:
        queries.append(arguments)
        return PrometheusTraffic(np.arange(2.0), rates, lengths, lengths, 1234.0, 0.02)

    monkeypatch.setattr(prometheus, "read_traffic", read)
    options = ("--prometheus", "http://p:9090", "--window", "6h", "--model", "chat")
    result = run(cli, *options, "-o", "yaml")
    assert block(result)["rate"] == 3
    assert "1,234 requests, 3 per second and 5 at the peak" in result.stdout
    assert "2.0% of requests are longer than the last bucket" in result.stdout
    ((url, _, window_s, model),) = queries
    assert (url, window_s, model) == ("http://p:9090", 6 * 3600, "chat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a file or a name, or --prometheus URL"),
        (["chat-1m", "--prometheus", "http://p"], "give either a file or a name"),
        (["chat-1n"], "no published workload 'chat-1n'; did you mean chat-1m?"),
        (["absent.csv"], "absent.csv: cannot be read: No such file or directory"),
        (["chat-1m", "--sample", "5"], "--sample and --output-file must be given together"),
        (["chat-1m", "--rate", "0"], "rate 0: must be above 0 requests per second"),
        (["chat-1m", "--rate", "nan"], "rate nan: must be above 0"),
        (["--prometheus", "p:9090"], "Prometheus: state a URL such as http://prometheus:9090"),
        (["--prometheus", "http://p", "--window", "1y"], "--window 1y: must be a number and"),
    ],
)
def test_bad_input_is_exit_code_2_with_one_line(
    cli: CliRunner, arguments: list[str], message: str
) -> None:
    result = run(cli, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_fault_in_a_recording_is_reported_with_its_line(cli: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n1,2,3\n2,x,3\n")
    result = run(cli, file)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {file}:3: prompt_tokens 'x': not a number; drop or correct the request\n"
    )


@pytest.mark.parametrize("rate", ["-1", "1e300"])
def test_a_rate_that_no_deployment_has_is_reported(
    cli: CliRunner, recording: Path, rate: str
) -> None:
    result = run(cli, recording, "--rate", rate)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_names_are_completed() -> None:
    from cleave.cli.profiling.workload import complete_published

    assert complete_published("azure") == ["azure-code", "azure-conversation"]


def test_a_server_error_is_reported(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> PrometheusTraffic:
        raise HistoryError("Prometheus at http://p: no answer in 15 s")

    monkeypatch.setattr(prometheus, "read_traffic", read)
    result = run(cli, "--prometheus", "http://p")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: Prometheus at http://p: no answer in 15 s\n",
    )
