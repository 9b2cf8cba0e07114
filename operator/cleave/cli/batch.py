"""`cleave batch`: answers the requests of a file with capacity that is idle."""

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from cleave.cli.options import TableFormat, TableOutput
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail
from cleave.cli.output.progress_bar import show_progress

if TYPE_CHECKING:
    from cleave.batch.batch_client import BatchClient
    from cleave.batch.batch_run import BatchProgress
    from cleave.batch.result_files import ResultFiles

_SHOW_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 10.0
"""Between lines on standard error where that is not a terminal."""


def batch(
    file: Annotated[Path, Argument(help="Requests, one JSON object a line.", show_default=False)],
    endpoint: Annotated[
        str, Option(help="URL of the gateway, with or without /v1.")
    ] = "http://127.0.0.1:8080",
    results: Annotated[
        Path | None,
        Option(
            "--output-file",
            "-O",
            help="Answers. Default: FILE with the ending .output.jsonl.",
            show_default=False,
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        Option(
            "--error-file",
            help="Requests that failed. Default: FILE with the ending .errors.jsonl.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, Option(min=1, max=1024, help="Limit of requests at a time.")] = 128,
    timeout: Annotated[
        float, Option(min=1, max=2_592_000, help="Seconds after which the run ends, done or not.")
    ] = 86_400.0,
    request_timeout: Annotated[
        float, Option(min=1, max=86_400, help="Seconds for one request, with its wait.")
    ] = 900.0,
    api_key: Annotated[
        str | None, Option(envvar="CLEAVE_API_KEY", help="API key of the gateway.")
    ] = None,
    output: TableOutput = TableFormat.TABLE,
) -> None:
    """Answer the requests of a file with capacity that is idle.

    Lines and results have the form of OpenAI's Batch API. Requests get `service_tier: flex`, unless
    their body names another: the gateway starts them where others would not notice. A run that was
    stopped or killed is continued by the same command; to send failed requests again, remove the
    error file.

    Exit codes: 0 every request has a result, 1 some have none yet, or a file cannot be written, 2
    the input is invalid.

    \b
    Examples:
      # Answer requests.jsonl; answers go to requests.output.jsonl
      cleave batch requests.jsonl
      # Use a gateway in a cluster, and print a summary as JSON
      cleave batch requests.jsonl --endpoint http://chat.ai.svc -o json
    """
    from cleave.batch.batch_client import EndpointError, make_client
    from cleave.batch.batch_file import BatchFileError, check_batch
    from cleave.batch.batch_run import BatchProgress, UnauthorizedError
    from cleave.batch.result_files import ResultFiles, ResultFilesError

    if not file.name:
        fail([f"{file}: must be a regular file, as it is read twice"], BAD_INPUT)
    files = ResultFiles(
        results or file.with_suffix(".output.jsonl"), errors or file.with_suffix(".errors.jsonl")
    )
    paths = [os.path.realpath(path) for path in (file, files.output, files.errors)]
    if len({*paths}) < len(paths):
        fail(["FILE, --output-file and --error-file must be different files"], BAD_INPUT)
    started_at = time.monotonic()
    try:
        client = make_client(endpoint, api_key, request_timeout)
        known = check_batch(file)
        with files:
            files.check_belongs(known, file)
            progress = BatchProgress(len(known), files.num_succeeded, files.num_failed)
            num_before = progress.num_done
            asyncio.run(_run(file, files, client, progress, concurrency, timeout))
    except EndpointError as error:
        fail([f"--endpoint: {error}"], BAD_INPUT)
    except BatchFileError as error:
        fail(error.faults, BAD_INPUT)
    except UnauthorizedError as error:
        fail([f"{endpoint}: {error}: set CLEAVE_API_KEY or --api-key"], FAILED)
    except ResultFilesError as error:
        fail([str(error)], FAILED)
    _print_summary(progress, files, num_before, time.monotonic() - started_at, output)
    if progress.num_left:
        reason = f"; the last obstacle: {progress.obstacle}" if progress.obstacle else ""
        left = "1 request has" if progress.num_left == 1 else f"{progress.num_left} requests have"
        text = f"{left} no result yet{reason}"
        fail([f"{text}: run the same command to continue"], FAILED)


async def _run(
    file: Path,
    files: "ResultFiles",
    client: "BatchClient",
    progress: "BatchProgress",
    concurrency: int,
    timeout_s: float,
) -> None:
    from cleave.batch.batch_file import read_lines
    from cleave.batch.batch_run import BatchRun

    run = BatchRun(
        read_lines(file),
        files,
        client.send,
        progress,
        max_running=concurrency,
        rng=random.Random(),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, run.stop)
    showing = asyncio.create_task(_show(progress))
    try:
        await run.run(timeout_s)
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show(progress: "BatchProgress") -> None:
    """Show the progress, as a bar or in lines, until cancelled."""
    from rich.console import Console

    is_terminal = Console(stderr=True).is_terminal
    with show_progress("sending") as show:
        while True:
            text = f"{progress.num_running} running, {progress.num_failed} failed"
            if progress.obstacle:
                text += f"; waiting for capacity: {progress.obstacle}"
            if is_terminal:
                show(progress.num_done, progress.total, text)
            else:
                typer.echo(f"{progress.num_done} of {progress.total} done, {text}", err=True)
            await asyncio.sleep(_SHOW_INTERVAL_S if is_terminal else _LINE_INTERVAL_S)


def _print_summary(
    progress: "BatchProgress",
    files: "ResultFiles",
    num_before: int,
    seconds: float,
    output: TableFormat,
) -> None:
    if output is TableFormat.JSON:
        summary = {
            "total": progress.total,
            "succeeded": progress.num_succeeded,
            "failed": progress.num_failed,
            "remaining": progress.num_left,
            "doneBefore": num_before,
            "sentAgain": progress.num_refusals,
            "promptTokens": progress.prompt_tokens,
            "outputTokens": progress.output_tokens,
            "durationS": round(seconds, 3),
            "outputFile": str(files.output),
            "errorFile": str(files.errors),
        }
        typer.echo(json.dumps(summary, indent=1))
        return
    tokens = f"{progress.prompt_tokens} prompt and {progress.output_tokens} output tokens"
    count = progress.num_done - num_before
    typer.echo(
        f"{count} request{'' if count == 1 else 's'} in {seconds:.1f} s, {tokens}\n"
        f"{progress.num_succeeded} answered: {files.output}\n"
        f"{progress.num_failed} failed: {files.errors}"
    )
