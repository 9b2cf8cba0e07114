"""`cleave lengths`: trains a predictor of output lengths and evaluates it on other requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from cleave.cli.options import TableFormat, TableOutput
from cleave.cli.output.errors import BAD_INPUT, fail

if TYPE_CHECKING:
    from cleave.traffic.length_file import Scores

lengths = typer.Typer(no_args_is_help=True)

_Trace = Annotated[
    Path, Argument(help="CSV or JSON file of requests, as cleave workload reads them.")
]
_PromptError = Annotated[
    float,
    Option(
        min=0,
        max=2,
        help="Relative error of the gateway's prompt token estimates; ignored where the trace has "
        "a column estimated_prompt_tokens.",
    ),
]


@lengths.callback()
def group() -> None:
    """Train and evaluate a small classifier that predicts output lengths.
    Gateways load its file with --lengths FILE, or spec.routing.lengthsConfigMap in a cluster."""


@lengths.command()
def train(
    trace: _Trace,
    file: Annotated[Path, Option("--output-file", "-O", help="File to write, for gateways.")],
    prompt_error: _PromptError = 0.2,
    output: TableOutput = TableFormat.TABLE,
) -> None:
    """Train on the first 70 % of a trace, evaluate on the rest, and write both to a file.

    The features are prompt tokens and, where the trace has a column max_tokens, that limit.
    Gateways use the file only if it predicts better than the mean by prompt length, which they
    learn from traffic.

    Exit codes: 0 written, better or not, 2 the trace cannot be used.

    \b
    Examples:
      # Train on recorded requests
      cleave lengths train requests.csv -O lengths.json
    """
    from cleave.traffic import length_file, length_training
    from cleave.traffic.recordings.history_error import HistoryError

    try:
        trained = length_training.train(trace, prompt_error)
        length_file.write_length_file(file, trained)
    except (HistoryError, length_file.LengthsError) as error:
        fail([str(error)], BAD_INPUT)
    scores = trained.scores
    split = f"trained on {trained.trained_on:,} requests, evaluated on {trained.judged_by:,}"
    then = "gateways use it" if scores.is_better else "gateways keep using that"
    _print_scores(f"{trace}: {split}", scores, then, output)


@lengths.command()
def evaluate(
    trace: _Trace,
    file: Annotated[Path, Option("--with", help="File written by cleave lengths train.")],
    prompt_error: _PromptError = 0.2,
    output: TableOutput = TableFormat.TABLE,
) -> None:
    """Evaluate a trained file on a trace of newer requests than it was trained on.

    Exit codes: 0 evaluated, better or not, 2 the trace or the file cannot be used.

    \b
    Examples:
      # Evaluate on the requests of today
      cleave lengths evaluate today.jsonl --with lengths.json
    """
    from cleave.traffic import length_file, length_training
    from cleave.traffic.recordings.history_error import HistoryError

    try:
        trained = length_file.read_length_file(file)
        answers, _ = length_training.read_requests(trace, prompt_error)
    except (HistoryError, length_file.LengthsError) as error:
        fail([str(error)], BAD_INPUT)
    scores = length_training.evaluate_classifier(trained, answers)
    title = f"{trace}: {file} evaluated on {len(answers):,} requests"
    then = "keep it" if scores.is_better else "train another from newer traffic, or use none"
    _print_scores(title, scores, then, output)


def _print_scores(title: str, scores: "Scores", then: str, output: TableFormat) -> None:
    """Print the scores; `then`: the conclusion from them."""
    from cleave.cli.output.tables import build_plain_table, print_full_width, print_json

    if output is TableFormat.JSON:
        import msgspec

        print_json(msgspec.to_builtins(scores))
        return
    from rich.console import Console

    from cleave.traffic.length_file import GRANULARITIES

    ranges = (f"RANGE OF {width}" for width in GRANULARITIES)
    table = build_plain_table(["PREDICTOR"], [*ranges, "MEAN ERROR", "BIAS"])
    for name, score in (
        ("classifier", scores.classifier),
        ("mean by prompt length", scores.conditional_mean),
        ("one length for all", scores.constant),
    ):
        right = (f"{share:.1%}" for share in score.accuracy)
        table.add_row(name, *right, f"{score.mean_absolute_error:.1f}", f"{score.bias:+.1%}")
    console = Console(highlight=False)
    console.print(title, style="bold", soft_wrap=True)
    print_full_width(console, table)
    console.print(f"{scores.comparison}; {then}", soft_wrap=True)
