"""`cleave simulate`: figures of a given placement."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cleave.cli.main import app

MANIFEST = """\
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: facebook/opt-13b
  slo: {ttftMs: 400, tpotMs: 40}
  workload: {rate: 4, promptTokens: {mean: 300, p90: 600}, outputTokens: {mean: 60, p90: 120}}
  placement: {manual: [{role: prefill, replicas: 2}, {role: decode, maxNumSeqs: 64}]}
  engine: {type: Emulated}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sim.yaml"
    path.write_text(MANIFEST)
    return path


def run(cli: CliRunner, file: Path, *options: str):
    return cli.invoke(app, ["simulate", "-f", str(file), "--requests", "400", *options])


def test_the_table_shows_attainment_latencies_stages_and_instances(cli, file) -> None:
    done = run(cli, file)
    assert done.exit_code == 0
    placement, first = done.stdout.splitlines()[:2]
    assert placement == "placement: 2P tp1 + 1D tp1 (set in spec.placement.manual)"
    assert first.startswith("400 requests at 4.00 req/s: ")
    for text in ("MFU", "TTFT", "TPOT", "KV transfer", "prefill-1", "decode-0"):
        assert text in done.stdout


def test_without_a_placement_the_table_names_the_default(cli, file) -> None:
    lines = [line for line in MANIFEST.splitlines() if "placement:" not in line]
    file.write_text("\n".join(lines))
    first = run(cli, file).stdout.splitlines()[0]
    assert first.startswith("placement: 1P tp1 + 1D tp1 (the default; cleave plan")


def test_json_holds_what_csv_adds_up_to(cli, file) -> None:
    (figures,) = json.loads(run(cli, file, "-o", "json").stdout)
    rows = list(csv.DictReader(io.StringIO(run(cli, file, "-o", "csv").stdout)))
    assert len(rows) == 400
    met = [float(row["ttft_ms"]) <= 400 and float(row["tpot_ms"]) <= 40 for row in rows]
    assert figures["attainment"] == pytest.approx(sum(met) / 400)
    assert {row["prefill_instance"] for row in rows} == {"prefill-0", "prefill-1"}
    first = rows[0]
    stages = ("prefill_queue_ms", "prefill_ms", "transfer_ms", "decode_queue_ms", "decode_ms")
    whole = float(first["end_ms"]) - float(first["arrival_ms"])
    assert sum(float(first[name]) for name in stages) == pytest.approx(whole, abs=0.01)


def test_several_rates_are_a_line_each_and_more_load_is_never_better(cli, file) -> None:
    found = json.loads(run(cli, file, "--rates", "1,8,40", "-o", "json").stdout)
    assert [each["rate"] for each in found] == [1, 8, 40]
    shares = [each["attainment"] for each in found]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9 > shares[-1]
    _, heading, low, high, _ = run(cli, file, "--rates", "1,40").stdout.splitlines()
    assert low.count(" ms ") == 9
    names = "RATE ATTAINED TTFT P50 P90 P99 TPOT P50 P90 P99 ITL P50 P90 P99 BUSIEST SLO"
    assert heading.split() == names.split()
    # A time has two words, its heading one, but for the first of three.
    assert heading.index(" P90") < low.index(" ms", low.index(" ms") + 3) < heading.index(" P99")
    assert [line.split()[-1] for line in (heading, low, high)] == ["SLO", "met", "missed"]


def test_the_seed_decides_and_the_same_one_repeats(cli, file) -> None:
    first, again, other = (run(cli, file, "-o", "csv", "--seed", s).stdout for s in "112")
    assert first == again != other


def test_a_share_of_one_latency_is_compared_with_its_own_target(cli, file) -> None:
    own = MANIFEST.replace("tpotMs: 40}", "tpotMs: 40, ttftAttainment: 0.95, tpotAttainment: 0.99}")
    file.write_text(own)
    shown = run(cli, file).stdout
    assert "(target 95 %), TPOT alone " in shown
    assert "(target 99 %)" in shown
    assert "target: 90 % within TTFT P95 400 ms and TPOT P99 40.0 ms" in (
        run(cli, file, "--rates", "1,2").stdout
    )


def test_the_question_may_differ_from_the_file(cli, file) -> None:
    (strict,) = json.loads(run(cli, file, "-o", "json", "--slo-ttft", "1").stdout)
    assert strict["ttftAttainment"] == 0
    assert strict["itlMs"]["p50"] > 0
    assert "; ITL P99 " in run(cli, file, "--slo-itl-p99", "1").stdout
    missed = run(cli, file, "--rates", "1,2", "--slo-itl-p99", "1").stdout.splitlines()
    assert [line.split()[-1] for line in missed[2:4]] == ["missed", "missed"]
    (quick,) = json.loads(run(cli, file, "-o", "json", "--rate", "9").stdout)
    assert quick["rate"] == 9


@pytest.mark.parametrize("output", ["table", "json", "csv"])
def test_what_is_configured_and_not_simulated_is_a_line_on_stderr(cli, file, output) -> None:
    late = "engine: {type: Emulated}\n  gateway: {replicas: 1}"
    file.write_text(MANIFEST.replace("engine: {type: Emulated}", late))
    assert run(cli, file, "-o", output).stderr == ""
    file.write_text(file.read_text() + "  routing: {sessionHeader: x-user}\n")
    (line,) = run(cli, file, "-o", output).stderr.splitlines()
    assert line == (
        "note: not simulated: sessions that stay on an instance (routing.sessionHeader)"
    )


def test_more_prompts_that_repeat_than_memory_holds_are_refused_before_they_are_drawn(
    cli, file
) -> None:
    reuse = "outputTokens: {mean: 60}, reuse: {turns: 5, turnIntervalS: 30, newTokens: 1}}"
    file.write_text(MANIFEST.replace("outputTokens: {mean: 60, p90: 120}}", reuse))
    done = run(cli, file, "--requests", "5000000")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --requests 5000000: prompts that repeat are simulated in blocks")
    most = int(line.split()[-2])
    assert 500_000 < most < 2_000_000


def test_a_trace_replaces_declared_lengths(cli, file, tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{i * 0.5},{100 + i},{10 + i}" for i in range(20)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    done = run(cli, file, "-o", "csv", "--trace", str(trace), "--requests", "20")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [int(row["output_tokens"]) for row in rows] == [10 + i for i in range(20)]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--rates", "1,x"), "--rates 1,x: must be comma-separated numbers"),
        (("--rates", "0"), "--rates 0: every rate must be above 0"),
        (("--rates", "1,2", "-o", "csv"), "--rates with -o csv: give a single rate"),
        (("--rate", "-3"), "--rate: must be > 0"),
        (("--trace", "/absent.csv"), "spec.workload: "),
        (("--cluster", "/absent.yaml"), "/absent.yaml: No such file or directory"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(cli, file, options, fault) -> None:
    done = run(cli, file, *options)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"error: {fault}")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("type: Emulated", "type: vLLM", "--cluster: is required"),
        ("{role: decode, ", "{role: decode, parallelism: {tensor: 2}, ", "spec.placement.manual:"),
        ("type: Emulated", "type: Emulated, args: [--max-num-seqs=x]", "spec.engine.args: "),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(cli, file, old, new, fault) -> None:
    file.write_text(MANIFEST.replace(old, new))
    done = run(cli, file)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"error: {fault}")


def test_a_trace_with_hashes_shows_the_share_of_prompts_in_caches(cli, file, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 80, "output_length": 5, "hash_block_tokens": 16}
    rows = [line | {"timestamp": 1_000 * at, "hash_ids": [1, 2, 3, 4, 5]} for at in range(10)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--trace", str(trace), "--requests", "10")
    (figures,) = json.loads(run(cli, file, *options, "-o", "json").stdout)
    # On each of the two prefill instances, all but the first find all but the last token's block.
    assert figures["cachedShare"] == pytest.approx(0.8 * 64 / 80)
    assert "64 % of the prompt tokens were in prefix caches" in run(cli, file, *options).stdout
