"""`cleave plan`: what is printed, what is written, and with which exit code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cleave import distribution
from cleave.api.manifest import load, validate
from cleave.cli.main import app
from cleave.cli.planning.inputs import Overrides, apply_overrides
from cleave.planner import plan_search
from cleave.planner.plan import ReuseWorth

MANIFEST = """\
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: facebook/opt-13b
  slo: {ttftMs: 400, tpotMs: 40}
  workload: {rate: 4, promptTokens: {mean: 300, p90: 600}, outputTokens: {mean: 60, p90: 120}}
  planning: {maxGPUs: 4}
  engine: {type: Emulated}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def said(monkeypatch, answer):
    """The planner's answers, replaced by one made by hand."""
    questions = []

    def run_plan(reply=answer):
        def plan(problem, progress=None):
            questions.append(problem)
            if progress:
                progress(1, 2, "half-way")
            return reply

        monkeypatch.setattr(plan_search, "plan", plan)
        return questions

    return run_plan


def run(cli: CliRunner, file: Path, *options: str):
    return cli.invoke(app, ["plan", "-f", str(file), *options])


def test_the_verdict_comes_first_and_the_selected_plan_is_marked(cli, file, said, answer) -> None:
    said()
    done = run(cli, file)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("disaggregate: 2 prefill instances, each on 2 x A100-SXM-80GB")
    assert lines[1] == answer.reason
    (marked,) = [line for line in lines if line.lstrip().startswith("*")]
    shown = (
        "2P tp2 + 1D tp2 6 9.40 1.57 99.9 % 111/240/533 20.7/28.8/43.6 19.1/34.8/76.0 10.8 measured"
    )
    assert " ".join(marked.split()[1:]) == shown
    assert answer.what_would_change in lines
    assert f"warning: {answer.warnings[0]}" in lines


def test_what_reuse_is_worth_is_a_line_and_a_part_of_the_json(cli, file, said, answer) -> None:
    worth = ReuseWorth(0.31, 6, 8, "31 % of the prompt tokens are in prefix caches")
    said(replace(answer, reuse=worth))
    assert worth.text in run(cli, file).stdout.splitlines()
    shown = {"cachedShare": 0.31, "gpusWithout": 8, "reason": worth.text}
    assert json.loads(run(cli, file, "-o", "json").stdout)["reuse"] == shown
    manifest = yaml.safe_load(run(cli, file, "-o", "yaml").stdout)
    assert manifest["status"]["plan"]["reuse"] == shown


def test_the_requested_number_of_plans_is_shown(cli, file, said) -> None:
    said()
    lines = run(cli, file, "--top", "2").stdout.splitlines()
    assert len([line for line in lines if line.endswith("measured")]) == 2
    assert len(json.loads(run(cli, file, "--top", "2", "-o", "json").stdout)["alternatives"]) == 1


def test_json_contains_aladdins_laws_with_explain(cli, file) -> None:
    output = json.loads(run(cli, file, "-o", "json", "--explain").stdout)
    assert output["aladdin"]["workers"]["k5"] > 0
    assert "aladdin" not in json.loads(run(cli, file, "-o", "json").stdout)


def test_wide_adds_interval_limits_algorithm_and_source(cli, file, said) -> None:
    said()
    wide = run(cli, file, "-o", "wide").stdout
    for text in ("9.12-9.59", "256/8192 256/8192", "Algorithm 2", "DistServe's", "2.4 kW"):
        assert text in wide
        assert text not in run(cli, file).stdout


def test_explain_shows_the_question_and_the_assumptions_of_the_answer(cli, file) -> None:
    output = run(cli, file.with_name("plan.yaml"), "--explain", "--slo-tpot", "22").stdout
    facts = dict(line.split(maxsplit=1) for line in output.splitlines() if line[:1].isalpha())
    assert facts["input"].startswith(
        "opt-13b, 4.00 req/s, 90 % within TTFT 400 ms and TPOT 22.0 ms"
    )
    assert "P90 6" in facts["prompts"]
    assert facts["machines"].startswith("1 x 4 emulated GPU; at most 4 GPUs in use")
    assert facts["network"].startswith("InfiniBand, about 200 Gbit/s")
    assert facts["prefill"].startswith("batches as vLLM does today, at most 256 requests")
    assert "(DistServe, Eq. 1-2)" in output
    assert "at other rates: 1P tp1 + 2D tp1, times " in output
    assert "most tokens per GPU with 1 x emulated GPU" in output
    assert "distserve/opt-13b/tp1" in facts["latency"]


def test_yaml_is_a_manifest_that_can_be_applied_with_the_plan_as_its_placement(
    cli, file, said, answer
) -> None:
    said()
    document = yaml.safe_load(run(cli, file, "-o", "yaml").stdout)
    planned = validate(document)
    assert [(p.role, p.replicas) for p in planned.spec.placement.manual] == [
        ("prefill", 2),
        ("decode", 1),
    ]
    assert planned.spec.workload == load(file).spec.workload
    assert planned.status.plan.predicted.goodput == answer.selected.prediction.goodput
    assert len(planned.status.plan.alternatives) == 3


def test_cells_that_are_one_pod_are_planned_without_a_named_connector(cli, file) -> None:
    document = yaml.safe_load(MANIFEST)
    document["spec"] |= {
        "model": "meta-llama/Llama-3.1-8B",
        "slo": {"ttftMs": 400, "tpotMs": 7.1},
        "workload": {"rate": 12, "promptTokens": {"mean": 4000}, "outputTokens": {"mean": 300}},
        "engine": {"type": "vLLM"},
    }
    file.write_text(yaml.safe_dump(document))
    machines = file.with_name("cluster.yaml")
    nodes, slow = "nodes: [{gpu: H100-SXM-80GB, count: 2}]", "kind: Ethernet, bandwidthGbps: 25"
    machines.write_text(f"{{{nodes}, network: {{{slow}, cellBandwidthGbps: 2880}}}}")
    written = yaml.safe_load(run(cli, file, "--cluster", str(machines), "-o", "yaml").stdout)
    assert all(pool["perCell"] for pool in written["spec"]["placement"]["manual"])
    assert written["status"]["plan"]["predicted"]["kvLink"]["kind"] == "NVLink"
    # Where nobody has seen KV take NVLink, four GPUs are too few.
    machines.write_text(f"{{{nodes}, network: {{{slow}}}}}")
    assert run(cli, file, "--cluster", str(machines)).exit_code == 1


def test_prices_have_a_currency_a_source_and_a_date(cli, file, said) -> None:
    said()
    output = run(cli, file).stdout
    assert "USD/H" in output.splitlines()[2]
    (line,) = (line for line in output.splitlines() if line.startswith("USD/H: "))
    assert "AWS us-east-1" in line
    assert "2025, for a GPU's share" in line
    assert "pricePerHour under spec.planning.gpus sets yours" in line
    assert json.loads(run(cli, file, "-o", "json").stdout)["currency"] == "USD"


def test_infeasible_is_exit_code_1_and_names_the_nearest_slo(cli, file, said, infeasible) -> None:
    said(infeasible)
    done = run(cli, file)
    assert done.exit_code == 1
    first = done.stdout.splitlines()[0]
    assert first == "infeasible: no plan meets TTFT 20 ms; nearest SLO that holds is TTFT 180 ms"
    output = json.loads(run(cli, file, "-o", "json").stdout)
    assert (output["verdict"], output["selected"]) == ("Infeasible", None)


def test_without_a_plan_no_manifest_is_printed(cli, file, said, infeasible) -> None:
    said(infeasible)
    done = run(cli, file, "-o", "yaml")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: infeasible: no plan meets TTFT 20 ms")


TEAMS = "name: chat, namespace: team, labels: {team_a: b}, annotations: {example.org/c: d}"


@pytest.mark.parametrize("options", [(), ("--rate", "9")])
def test_yaml_has_the_namespace_of_the_file_or_none(cli, file, said, options) -> None:
    said()
    done = run(cli, file, "-o", "yaml", *options)
    assert yaml.safe_load(done.stdout)["metadata"] == {"name": "chat"}
    assert "plans no more" in done.stderr
    file.write_text(MANIFEST.replace("name: chat", TEAMS))
    done = run(cli, file, "-o", "yaml", *options)
    assert yaml.safe_load(done.stdout)["metadata"] == yaml.safe_load(f"{{{TEAMS}}}")


def test_only_a_terminal_sees_the_progress_bar(cli, file, said) -> None:
    said()
    assert run(cli, file, "-o", "json").stderr == ""


def test_the_question_may_differ_from_the_file(cli, file, said) -> None:
    questions = said()
    slo = ("--slo-ttft", "250", "--slo-tpot", "30", "--slo-itl-p99", "90")
    run(cli, file, "--rate", "9", *slo, "--seed", "5")
    (problem,) = questions
    assert (problem.rate, problem.slo.ttft_ms, problem.slo.tpot_ms) == (9, 250, 30)
    assert problem.slo.itl_p99_ms == 90
    assert (problem.slo.attainment, problem.seed) == (0.9, 5)


def test_a_trace_takes_the_place_of_lengths_and_keeps_the_burstiness(file, tmp_path) -> None:
    declared = load(MANIFEST.replace("rate: 4", "rate: 4, burstiness: 2"))
    overridden = apply_overrides(declared, Overrides(trace=tmp_path / "t.csv", rate=3))
    traffic = overridden.spec.workload
    assert (traffic.trace.path, traffic.rate) == (str(tmp_path / "t.csv"), 3)
    assert (traffic.prompt_tokens, traffic.burstiness) == (None, 2)
    replayed = apply_overrides(declared, Overrides(trace=tmp_path / "t.csv"))
    assert replayed.spec.workload.burstiness is None


@pytest.mark.parametrize(
    ("old", "new", "options", "fault"),
    [
        ("ttftMs: 400", "ttftMs: -1", (), "spec.slo.ttftMs: must be > 0"),
        ("type: Emulated", "type: vLLM", (), "--cluster: is required"),
        ("  workload:", "  # workload:", (), "spec.workload: required"),
        ("", "", ("--rate", "0"), "--rate: must be > 0"),
        ("", "", ("--slo-ttft", "-1"), "--slo-ttft: must be > 0"),
        ("", "", ("--slo-itl-p99", "0"), "--slo-itl-p99: must be > 0"),
        ("", "", ("--cluster", "/absent.yaml"), "/absent.yaml: No such file or directory"),
        ("", "", ("--trace", "/absent.csv"), "spec.workload: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, file, said, old, new, options, fault) -> None:
    said()
    file.write_text(MANIFEST.replace(old, new) if old else MANIFEST)
    done = run(cli, file, *options)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"error: {fault}")


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        ("nodes: [{gpu: A100-SXM-80GB, gpusPerNode: 0}]", "nodes[0].gpusPerNode: must be >= 1"),
        ("nodes: []", "nodes: must have at least 1 entry"),
        ("nodes: [{gpu: A100-SXM-80GX}]", "nodes[0].gpu: unknown GPU 'A100-SXM-80GX'"),
        ("nodes: [{gpu: H100}]\nprofiles: [gone.yaml]", "profiles[0]: "),
        ("- 1", "must be an object"),
    ],
)
def test_a_faulty_cluster_is_one_line_and_exit_code_2(cli, file, tmp_path, cluster, fault) -> None:
    machines = tmp_path / "cluster.yaml"
    machines.write_text(cluster)
    done = run(cli, file, "--cluster", str(machines))
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"error: {fault}")


def test_a_model_that_nothing_describes_is_one_line_and_exit_code_2(cli, file, tmp_path) -> None:
    machines = tmp_path / "cluster.yaml"
    machines.write_text("nodes: [{gpu: H100}]")
    file.write_text(MANIFEST.replace("facebook/opt-13b", "nobody/knows-this"))
    done = run(cli, file, "--cluster", str(machines))
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith("error: spec.model")


def test_a_real_search_plans_emulated_engines_and_writes_the_page(cli, file, tmp_path) -> None:
    report = tmp_path / "plan.html"
    done = run(cli, file, "-o", "json", "--report", str(report))
    assert done.exit_code == 0, done.stderr
    output = json.loads(done.stdout)
    chosen = output["selected"]
    assert chosen["predicted"]["attainment"] >= 0.9
    assert chosen["gpus"] <= 4
    page = report.read_text()
    assert "Plan for chat - Cleave" in page
    assert "the emulated engine" in page


def test_an_unwritable_page_is_reported_before_the_search(cli, file, said) -> None:
    questions = said()
    done = run(cli, file, "--report", "/absent/folder/plan.html")
    assert (done.exit_code, questions) == (2, [])
    fault = "--report /absent/folder/plan.html: folder /absent/folder does not exist"
    assert done.stderr == f"error: {fault}\n"


def test_a_folder_is_no_file_for_a_page(cli, file, tmp_path) -> None:
    done = run(cli, file, "--report", str(tmp_path))
    assert done.exit_code == 1
    assert done.stderr == f"error: {tmp_path} cannot be written: Is a directory\n"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_without_the_planner_the_remedy_is_one_line(cli, file, monkeypatch, command) -> None:
    monkeypatch.setattr(distribution, "find_missing_extras", list)
    done = cli.invoke(app, [command, "-f", str(file)])
    assert done.exit_code == 1
    assert done.stderr == f"error: 'cleave {command}' needs the extra \"planner\": make setup\n"


def test_what_a_plan_does_not_use_and_what_cannot_repeat_is_said_on_standard_error(
    cli, file, said
) -> None:
    said()
    placement = "  placement: {manual: [{role: mixed}]}\n"
    reuse = "outputTokens: {mean: 60}, reuse: {turns: 4, turnIntervalS: 40, newTokens: 300}}"
    text = MANIFEST.replace("outputTokens: {mean: 60, p90: 120}}", reuse)
    file.write_text(text + placement)
    lines = run(cli, file).stderr.splitlines()
    assert [line for line in lines if line.startswith("warning: spec.workload.reuse: newTokens")]
    assert "note: spec.placement is not used; cleave simulate predicts it" in lines
