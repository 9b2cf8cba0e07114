import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from cleave.cli.main import app
from cleave.local import state
from cleave.local.state import DeploymentSnapshot

COMMANDS = (
    "demo",
    "plan",
    "simulate",
    "up",
    "status",
    "logs",
    "down",
    "validate",
    "render",
    "rollout",
    "profile",
    "workload",
    "provision",
    "gateway",
    "operator",
)
OWN_OPTIONS = ("gateway", "operator")
"""Commands whose programs read their own options."""

HEAVY = ("grpc", "pydantic", "kubernetes", "numpy", "httpx", "torch", "yaml")


def test_help_names_every_command(cli: CliRunner) -> None:
    result = cli.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(re.search(rf"^\W*{name}\b", result.output, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in OWN_OPTIONS])
def test_every_command_explains_itself_with_an_example(cli: CliRunner, command: str) -> None:
    result = cli.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"cleave {command}" in result.output.partition("Usage")[2].partition("\n")[2]


def test_a_wrong_choice_is_named_without_the_checker_s_own_words(cli: CliRunner) -> None:
    result = cli.invoke(app, ["plan", "-f", "x.yaml", "-o", "ymal"])
    assert result.exit_code == 2
    assert "'ymal' is not one of" in result.stderr
    assert "Value error" not in result.stderr


@pytest.mark.parametrize(
    "command", ["plan", "simulate", "provision", "up", "validate", "render", "rollout"]
)
def test_a_manifest_without_its_option_is_one_line_with_the_command_to_write(
    cli: CliRunner, command: str
) -> None:
    for more in ([], ["--cluster", "c.yaml"]):
        result = cli.invoke(app, [command, "chat.yaml", *more])
        assert result.exit_code == 2
        assert result.stderr == (
            f"error: chat.yaml: name the manifest with -f: cleave {command} -f chat.yaml\n"
        )


def test_two_manifests_and_a_folder_are_refused(cli: CliRunner, manifest: Path) -> None:
    result = cli.invoke(app, ["plan", "-f", str(manifest), "-f", "other.yaml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: -f: given more than once; name one file")
    result = cli.invoke(app, ["plan", "-f", str(manifest.parent)])
    assert result.exit_code == 2
    assert result.stderr == f"error: {manifest.parent}: is a folder; name one file of it\n"


def test_options_are_spelled_alike_in_all_commands() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    nested = [each for each in group.commands.values() if isinstance(each, TyperGroup)]
    commands = [
        *group.commands.values(),
        *(sub for each in nested for sub in each.commands.values()),
    ]
    meanings: dict[str, set[str]] = {}
    for command in commands:
        for option in command.params:
            for short in (name for name in option.opts if len(name) == 2):
                meanings.setdefault(short, set()).add(option.opts[0])
    assert meanings.pop("-f") == {"--file", "--follow"}
    assert all(len(longs) == 1 for longs in meanings.values()), meanings
    assert meanings["-o"] == {"--output"}


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys, cleave.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_that_of_the_distribution(cli: CliRunner) -> None:
    assert re.fullmatch(r"cleave \d+\.\d+\.\d+\n", cli.invoke(app, ["--version"]).output)


def test_a_faulty_manifest_is_exit_code_2_with_one_line_per_fault(
    cli: CliRunner, manifest: Path
) -> None:
    text = manifest.read_text().replace("ttftMs: 400", "ttftMs: -4").replace("model:", "modle:")
    manifest.write_text(text)
    for command in (["validate"], ["up"], ["up", "--dry-run"]):
        result = cli.invoke(app, [*command, "-f", str(manifest)])
        assert result.exit_code == 2
        lines = result.stderr.splitlines()
        assert any(line.startswith("error: spec.slo.ttftMs: must be > 0") for line in lines)
        assert any(line.startswith("error: spec.modle: unknown field") for line in lines)
        assert all(line.startswith("error: ") for line in lines)


def test_an_unknown_latency_profile_is_reported_before_anything_starts(
    cli: CliRunner, manifest: Path
) -> None:
    manifest.write_text(manifest.read_text().replace("timeScale", "latency: nope, timeScale"))
    for command in ("validate", "up"):
        result = cli.invoke(app, [command, "-f", str(manifest)])
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2
        assert line.startswith("error: spec.engine.emulated.latency: no latency profile 'nope'")


def test_an_absent_file_and_a_missing_option_are_exit_code_2(
    cli: CliRunner, tmp_path: Path
) -> None:
    absent = cli.invoke(app, ["up", "-f", str(tmp_path / "absent.yaml")])
    assert (absent.exit_code, len(absent.stderr.splitlines())) == (2, 1)
    assert cli.invoke(app, ["up"]).exit_code == 2


def test_validate_names_what_it_found(cli: CliRunner, manifest: Path) -> None:
    result = cli.invoke(app, ["validate", "-f", str(manifest)])
    assert result.exit_code == 0
    assert result.output == f"{manifest}: LLMDeployment chat is valid\n"


@pytest.mark.parametrize("command", [["validate"], ["up", "--dry-run"], ["render"]])
def test_a_manifest_may_come_from_standard_input(
    cli: CliRunner, manifest: Path, command: list[str]
) -> None:
    text = f"{manifest.read_text()}  workload: {{rate: 1, promptTokens: {{mean: 9}}, "
    text += "outputTokens: {mean: 9}}\n  placement: {manual: [{role: mixed}]}\n"
    result = cli.invoke(app, [*command, "-f", "-"], input=text)
    assert (result.exit_code, result.stderr) == (0, "")


def test_validate_reads_the_trace_and_the_cluster_that_a_plan_needs(
    cli: CliRunner, manifest: Path, tmp_path: Path
) -> None:
    manifest.write_text(f"{manifest.read_text()}  workload: {{trace: {{path: gone.csv}}}}\n")
    result = cli.invoke(app, ["validate", "-f", str(manifest)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: spec.workload: ")
    assert "gone.csv" in result.stderr
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: [{gpu: H99}]")
    result = cli.invoke(app, ["validate", "-f", str(manifest), "--cluster", str(cluster)])
    assert (result.exit_code, "unknown GPU 'H99'" in result.stderr) == (2, True)


def test_validate_refuses_a_model_that_fits_on_no_instance_of_the_cluster(
    cli: CliRunner, manifest: Path, tmp_path: Path
) -> None:
    resource = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "big"},
        "spec": {
            "model": "meta-llama/Llama-3.1-405B-Instruct",
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "workload": {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}},
            "planning": {"maxGPUs": 1},
        },
    }
    manifest.write_text(json.dumps(resource))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: [{gpu: A100-SXM-80GB, gpusPerNode: 8}]")
    result = cli.invoke(app, ["validate", "-f", str(manifest), "--cluster", str(cluster)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: spec.model: llama-3.1-405b does not fit: ")


def test_targets_that_look_like_seconds_are_a_warning(cli: CliRunner, manifest: Path) -> None:
    text = manifest.read_text().replace("ttftMs: 400", "ttftMs: 0.4")
    manifest.write_text(text.replace("tpotMs: 40", "tpotMs: 0.04"))
    result = cli.invoke(app, ["validate", "-f", str(manifest)])
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: spec.slo.ttftMs: 0.4 is 0.4 milliseconds; are these seconds? 0.4 s is 400",
        "warning: spec.slo.tpotMs: 0.04 is 0.04 milliseconds; are these seconds? 0.04 s is 40",
    ]


UNKNOWN = """\
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: example/unknown-9b
  slo: {ttftMs: 400, tpotMs: 40}
  workload: {rate: 2, promptTokens: {mean: 400}, outputTokens: {mean: 90}}
"""


def test_a_model_that_cannot_be_planned_is_valid_and_comes_up_as_the_smallest_pair(
    cli: CliRunner, tmp_path: Path
) -> None:
    manifest, cluster = tmp_path / "chat.yaml", tmp_path / "cluster.yaml"
    manifest.write_text(UNKNOWN)
    cluster.write_text("nodes: [{gpu: H100-SXM-80GB}]")
    files = ["-f", str(manifest), "--cluster", str(cluster)]
    valid = cli.invoke(app, ["validate", *files])
    assert valid.exit_code == 0
    said, remedy = valid.stderr.splitlines()
    assert said.startswith("warning: spec.model.source: it is not in Cleave's model table")
    assert "one prefill and one decode instance" in said
    assert "config.json" in remedy
    started = cli.invoke(app, ["up", *files, "--dry-run"])
    assert (started.exit_code, started.stderr) == (0, valid.stderr)
    manifest.write_text(
        f"{UNKNOWN.partition('  workload')[0]}  workload: {{trace: {{path: gone.csv}}}}\n"
    )
    for command in (["validate", *files], ["up", *files, "--dry-run"]):
        refused = cli.invoke(app, command)
        assert (refused.exit_code, "error: spec.workload: " in refused.stderr) == (2, True)
        assert "gone.csv" in refused.stderr
    names = [pod["metadata"]["name"] for pod in yaml.safe_load_all(started.stdout)]
    assert names == ["chat-prefill-0", "chat-decode-0", "chat-gateway"]
    cluster.write_text("nodes: [{gpu: H99}]")
    result = cli.invoke(app, ["validate", *files])
    assert (result.exit_code, "unknown GPU 'H99'" in result.stderr) == (2, True)


def test_render_prints_the_objects_of_a_cluster(cli: CliRunner, manifest: Path) -> None:
    text = manifest.read_text()
    manifest.write_text(text.replace("engine:", "gateway: {keysSecret: keys}\n  engine:"))
    assert cli.invoke(app, ["up", "--dry-run", "-f", str(manifest)]).exit_code == 1
    done = cli.invoke(app, ["render", "-f", str(manifest), "--image-prefix", "registry.example/"])
    assert (done.exit_code, done.stderr) == (0, "")
    objects = list(yaml.safe_load_all(done.stdout))
    pods = [each for each in objects if each["kind"] == "Pod"]
    assert [pod["metadata"]["name"] for pod in pods] == ["chat-prefill-0", "chat-decode-0"]
    assert pods[0]["spec"]["containers"][0]["image"].startswith("registry.example/")
    (gateway,) = (each for each in objects if each["kind"] == "Deployment")
    volumes = gateway["spec"]["template"]["spec"]["volumes"]
    assert "keys" in [volume.get("secret", {}).get("secretName") for volume in volumes]


def test_a_pair_that_vllm_cannot_pair_is_refused_before_anything_starts(
    cli: CliRunner, tmp_path: Path
) -> None:
    manifest = tmp_path / "chat.yaml"
    placement = (
        "  placement: {manual: [{role: prefill, parallelism: {tensor: 8}}, "
        "{role: decode, parallelism: {tensor: 4}}]}\n  engine: {connector: Nixl}\n"
    )
    manifest.write_text(UNKNOWN.replace("example/unknown-9b", "Qwen/Qwen3-30B-A3B") + placement)
    for command in (["validate"], ["up", "--dry-run"], ["simulate"]):
        cluster = tmp_path / "cluster.yaml"
        cluster.write_text("nodes: [{gpu: H100-SXM-80GB, count: 2}]")
        result = cli.invoke(app, [*command, "-f", str(manifest), "--cluster", str(cluster)])
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2
        assert line.startswith("error: spec.placement.manual[1].parallelism.tensor: 4 cannot take")


def test_a_dry_run_prints_the_pods_and_starts_nothing(
    cli: CliRunner, manifest: Path, state_root: Path
) -> None:
    result = cli.invoke(app, ["up", "-f", str(manifest), "--port", "8123", "--dry-run"])
    assert result.exit_code == 0
    pods = list(yaml.safe_load_all(result.output))
    names = [pod["metadata"]["name"] for pod in pods]
    assert names == ["chat-prefill-0", "chat-decode-0", "chat-gateway"]
    command = pods[-1]["spec"]["containers"][0]["command"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "8123"
    assert not state_root.exists()


def test_a_workload_is_planned_before_the_pods_are_created(cli: CliRunner, manifest: Path) -> None:
    lengths = "promptTokens: {mean: 400, p90: 850}, outputTokens: {mean: 90, p90: 190}"
    text = manifest.read_text().replace("tpotMs: 40", "tpotMs: 25").replace("timeScale: 0.01", "")
    manifest.write_text(f"{text}  workload: {{rate: 8, {lengths}}}\n")
    result = cli.invoke(app, ["up", "-f", str(manifest), "--dry-run"])
    assert result.exit_code == 0, result.stderr
    workers = [pod for pod in yaml.safe_load_all(result.output) if "gateway" not in str(pod)[:200]]
    assert len(workers) == 3
    assert "--max-num-batched-tokens" in workers[0]["spec"]["containers"][0]["command"]


def test_a_workload_that_no_plan_holds_is_refused_in_one_line(
    cli: CliRunner, manifest: Path
) -> None:
    text = manifest.read_text().replace("ttftMs: 400", "ttftMs: 10")
    lengths = "promptTokens: {mean: 400}, outputTokens: {mean: 90}"
    manifest.write_text(f"{text}  workload: {{rate: 1, {lengths}}}\n".replace("0.01", "1"))
    result = cli.invoke(app, ["up", "-f", str(manifest), "--dry-run"])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1
    assert line.startswith("error: infeasible: no plan meets TTFT 10.0 ms")


def test_a_deployment_that_is_not_up_is_reported_in_one_line(cli: CliRunner) -> None:
    assert cli.invoke(app, ["status"]).output == "no deployments running on this machine\n"
    assert cli.invoke(app, ["status", "-o", "json"]).output == "[]\n"
    for command in (["status", "chat"], ["down", "chat"]):
        result = cli.invoke(app, command)
        assert (result.exit_code, result.stderr) == (
            1,
            "error: chat is not running on this machine\n",
        )
    both = cli.invoke(app, ["down", "chat", "code"])
    assert (both.exit_code, both.stderr.startswith("error: chat is not running")) == (1, True)
    assert cli.invoke(app, ["down"]).stderr == "error: no deployments running on this machine\n"


def test_logs_are_those_of_one_pod_or_of_all(cli: CliRunner, state_root: Path) -> None:
    assert cli.invoke(app, ["logs", "chat"]).exit_code == 1
    folder = state_root / "chat" / "logs"
    folder.mkdir(parents=True)
    (folder / "a.log").write_text("one\ntwo\n")
    (folder / "b.log").write_text("three\n")
    assert cli.invoke(app, ["logs", "chat", "a", "-n", "1"]).output == "two\n"
    assert cli.invoke(app, ["logs", "chat"]).output == "a | one\na | two\nb | three\n"
    unknown = cli.invoke(app, ["logs", "chat", "c"])
    assert (unknown.exit_code, unknown.stderr) == (1, "error: chat has no pod c; it has a, b\n")


def test_logs_since_a_time_are_all_newer_lines(cli: CliRunner, state_root: Path) -> None:
    folder = state_root / "chat" / "logs"
    folder.mkdir(parents=True)
    now = time.time()
    old, new = (
        time.strftime("%Y-%m-%d %H:%M:%S,000", time.localtime(now - age)) for age in (3_600, 60)
    )
    lines = [f"{old} INFO a: one", f"{new} INFO a: two", "Traceback", *["three"] * 200]
    (folder / "a.log").write_text("\n".join(lines) + "\n")
    assert cli.invoke(app, ["logs", "chat", "--since", "30m"]).output.splitlines() == lines[1:]
    last = cli.invoke(app, ["logs", "chat", "--since", "2h", "-n", "1"])
    assert last.output == "three\n"
    assert cli.invoke(app, ["logs", "chat", "--since", "5s"]).output == ""
    assert cli.invoke(app, ["logs", "chat", "--since", "999999999d"]).exit_code == 0
    strange = cli.invoke(app, ["logs", "chat", "--since", "yesterday"])
    assert strange.exit_code == 2
    assert "90s, 10m, 2h or 1d" in strange.stderr


def test_a_log_may_be_followed_without_its_past(cli: CliRunner, state_root: Path) -> None:
    folder = state_root / "chat" / "logs"
    folder.mkdir(parents=True)
    (folder / "a.log").write_text("one\ntwo\n")
    assert cli.invoke(app, ["logs", "chat", "a", "-n", "0"]).output == ""


def test_a_deployment_with_a_killed_supervisor_is_reported_until_it_is_removed(
    cli: CliRunner,
) -> None:
    with state.get_folder("chat").lock():
        state.get_folder("chat").write(DeploymentSnapshot("chat", 1, "http://127.0.0.1:1"))
    result = cli.invoke(app, ["status", "-o", "json"])
    assert result.stdout == "[]\n"
    assert result.stderr.startswith("chat: its supervisor was killed")
    named = cli.invoke(app, ["status", "chat"])
    assert (named.exit_code, named.stderr.count("was killed")) == (1, 1)
    with state.get_folder("code").lock():
        state.get_folder("code").write(DeploymentSnapshot("code", 1, "http://127.0.0.1:1"))
    wrong = cli.invoke(app, ["down", "chat", "cod"])
    assert (wrong.exit_code, wrong.stdout) == (1, ""), "nothing is stopped"
    stopped = cli.invoke(app, ["down", "chat", "code", "chat"]).output
    assert stopped == "chat stopped\ncode stopped\n"
    assert cli.invoke(app, ["status"]).output == "no deployments running on this machine\n"


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_error_for_an_unusable_state_folder_names_the_remedy(
    cli: CliRunner, manifest: Path, monkeypatch: pytest.MonkeyPatch, port: str, command: str
) -> None:
    monkeypatch.setenv("CLEAVE_STATE_DIR", str(manifest / "below-a-file"))
    arguments = ["up", "-f", str(manifest)] if command == "up" else ["demo", "--engine", "emulated"]
    done = cli.invoke(app, [*arguments, "--port", port])
    assert done.exit_code == 1
    assert done.stderr.endswith("set CLEAVE_STATE_DIR to another folder\n")


@pytest.mark.parametrize(
    ("name", "option"), [("gateway", "--queue-limit"), ("operator", "--lease")]
)
def test_some_programs_read_their_own_options(cli: CliRunner, name: str, option: str) -> None:
    assert option in cli.invoke(app, [name, "--help"]).output
    assert cli.invoke(app, [name, "--no-such-option"]).exit_code == 2


def test_names_are_completed(state_root: Path) -> None:
    from cleave.cli.options import complete_logged, complete_running

    with state.get_folder("chat").lock():
        assert complete_running("c") == ["chat"]
        assert complete_running("x") == []
    assert complete_running("c") == []
    assert complete_logged("") == ["chat"]
