import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cleave.cli.main import app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two applications by turns: 600 and 900 tokens of prompt."""
    path = tmp_path / "requests.csv"
    rows = ("600,70\n900,720\n" for _ in range(1_000))
    path.write_text("prompt_tokens,output_tokens\n" + "".join(rows))
    return path


def run(cli: CliRunner, *arguments: str | Path) -> Result:
    return cli.invoke(app, ["lengths", *map(str, arguments)])


def test_training_writes_a_file_and_says_how_good_it_is(cli, trace, tmp_path) -> None:
    file = tmp_path / "lengths.json"
    result = run(cli, "train", trace, "-O", file, "--prompt-error", "0")
    assert result.exit_code == 0, result.output
    assert "trained on 1,400 requests, evaluated on 600" in result.stdout
    assert "classifier" in result.stdout
    assert "mean by prompt length" in result.stdout
    assert "gateways use it" in result.stdout
    assert json.loads(file.read_text())["trace"] == "requests.csv"


def test_another_trace_judges_the_file(cli, trace, tmp_path) -> None:
    file, later = tmp_path / "lengths.json", tmp_path / "later.csv"
    run(cli, "train", trace, "-O", file)
    later.write_text("prompt_tokens,output_tokens\n" + "600,300\n" * 2_000)
    result = run(cli, "evaluate", later, "--with", file, "-o", "json")
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    mean, classifier = scores["conditionalMean"], scores["classifier"]
    assert classifier["meanAbsoluteError"] > mean["meanAbsoluteError"]
    assert "train another" in run(cli, "evaluate", later, "--with", file).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "none.csv", "-O", "x.json"), "none.csv: cannot be read"),
        (("train", "{trace}", "-O", "no/folder/x.json"), "no/folder/x.json: cannot be written"),
        (("evaluate", "{trace}", "--with", "none.json"), "none.json: cannot be read"),
        (("evaluate", "{trace}", "--with", "{trace}"), "not a file of trained lengths"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(cli, trace, arguments, message) -> None:
    result = run(cli, *(each.format(trace=trace) for each in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
