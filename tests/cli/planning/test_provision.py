import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cleave.cli.main import app

MANIFEST = """\
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: llama-2-70b
  slo: {ttftMs: 400, tpotMs: 40}
  workload: {rate: 6, promptTokens: {mean: 800, p90: 1600}, outputTokens: {mean: 30}}
"""
MACHINES = """\
nodes:
  - {gpu: A100-SXM-80GB}
  - {gpu: H100-SXM-80GB}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "chat.yaml").write_text(MANIFEST)
    (tmp_path / "cluster.yaml").write_text(MACHINES)
    return ("-f", str(tmp_path / "chat.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))


def run(cli: CliRunner, *arguments: str) -> Result:
    return cli.invoke(app, ["provision", *arguments])


def test_the_cheapest_cluster_for_the_rate_comes_first(
    cli: CliRunner, files: tuple[str, ...]
) -> None:
    result = run(cli, *files, "--max-machines", "12", "-o", "json")
    assert result.exit_code == 0, result.output
    designs = json.loads(result.stdout)
    costs = [design["costPerHour"] for design in designs]
    assert costs == sorted(costs)
    assert {design["rate"] for design in designs} == {6.0}
    assert designs[0]["slowdowns"]["ttft"]["p90"] <= 3


def test_a_budget_of_power_may_be_spent_on_capped_machines(
    cli: CliRunner, files: tuple[str, ...]
) -> None:
    options = ("--goal", "throughput", "--max-power", "25000", "--token-cap", "0.5", "-o", "yaml")
    result = run(cli, *files, *options)
    assert result.exit_code == 0, result.output
    designs = yaml.safe_load(result.stdout)
    assert any(design["name"].endswith("at 50%") for design in designs)
    assert all(design["powerWatts"] <= 25_000 for design in designs)


def test_the_table_names_machines_and_slowdowns(cli: CliRunner, files: tuple[str, ...]) -> None:
    result = run(cli, *files, "--max-machines", "12")
    assert result.exit_code == 0, result.output
    heading, *_ = result.stdout.strip().splitlines()
    figures = ["REQ/S", "COST/H", "KW", "TTFT", "TPOT", "E2E"]
    assert heading.split() == ["MACHINES", "PROMPT", "TOKEN", *figures]
    assert "H100-SXM-80GB mixed" in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--goal", "throughput"], 2, "--goal throughput: set --max-power or --max-cost"),
        (
            ["--reference", "B200"],
            2,
            "--reference B200: must be one of A100-SXM-80GB, H100-SXM-80GB",
        ),
        (["--rate", "5000", "--max-machines", "3"], 1, "no cluster of up to 3 machines"),
        (["--max-cost", "-1"], 2, "--max-cost -1: must be above 0"),
    ],
)
def test_faults_are_one_line(
    cli: CliRunner, files: tuple[str, ...], options: list[str], code: int, message: str
) -> None:
    result = run(cli, *files, *options)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
