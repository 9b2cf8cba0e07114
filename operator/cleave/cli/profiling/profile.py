"""`cleave profile`: measures a running engine and writes a profile for planner and emulator."""

import asyncio
import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from cleave import distribution
from cleave.cli.options import TableFormat, TableOutput
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail, report_local_errors
from cleave.cli.output.progress_bar import show_progress

if TYPE_CHECKING:
    from rich.table import Table

    from cleave.perf.profile.profile import MeasuredProfile
    from cleave.profiling.engine_info import EngineInfo
    from cleave.profiling.measurement_plan import ProfilingSettings, SamplesByCase

_LOCAL_URL = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])([:/]|$)")


def profile(
    url: Annotated[str, Argument(help="URL of the engine, such as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, Option(help="Served model name. Required if the engine serves several.")
    ] = None,
    file: Annotated[
        Path, Option("--output-file", "-O", help="Profile to write, YAML or .json.")
    ] = Path("profile.yaml"),
    device: Annotated[
        str | None, Option(help="Device of the engine. Default: this machine's GPU or CPU.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, Option(min=1, max=64, help="Tensor parallel size of the engine.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, Option(min=1, max=64, help="Pipeline parallel size of the engine.")
    ] = 1,
    longest_prompt: Annotated[
        int | None, Option(min=32, help="Maximum prompt length to measure, in tokens.")
    ] = None,
    repeats: Annotated[
        int | None, Option(min=1, max=100, help="Number of measurements of each point.")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Measure few points, for a first estimate only.")
    ] = False,
    force: Annotated[
        bool, Option("--force", help="Write the profile even if measurements scatter.")
    ] = False,
    api_key: Annotated[
        str | None, Option(envvar="CLEAVE_API_KEY", help="API key of the engine.")
    ] = None,
    output: TableOutput = TableFormat.TABLE,
) -> None:
    """Measure the latencies of a running engine and write them to a profile.

    The engine must have no other traffic. Its --max-num-batched-tokens limits the prompt lengths
    that can be measured. Batches that cannot be observed are named and left out.

    \b
    Examples:
      # Measure an engine on this machine, also one of `cleave up` (its URL: cleave status -o json)
      cleave profile http://127.0.0.1:8000 -O llama-h100.yaml
    """
    from cleave.perf.profile.profile import write_profile
    from cleave.profiling.errors import ProfilingError
    from cleave.profiling.measurement_plan import QUICK, ProfilingSettings
    from cleave.profiling.profile_points import build_profile, list_scattered

    settings = QUICK if quick else ProfilingSettings()
    if repeats is not None:
        settings = replace(settings, repeats=repeats)
    if longest_prompt is not None:
        settings = replace(settings, max_prompt_tokens=longest_prompt)
    if not file.absolute().parent.is_dir():
        fail([f"--output-file: {file.parent} is not an existing folder"], BAD_INPUT)
    device = device or _detect_device(url)
    try:
        with report_local_errors():
            engine, samples, left_out = asyncio.run(
                _measure(url.rstrip("/"), api_key, model, settings)
            )
        measured = build_profile(
            samples,
            engine,
            device=device,
            measured_at=datetime.datetime.now(datetime.UTC).date().isoformat(),
            software={engine.engine: engine.version, "cleave": distribution.get_version()},
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
    except (ProfilingError, ValueError) as error:
        fail([str(error)], FAILED)
    scattered = list_scattered(samples, settings.max_spread)
    if scattered and not force:
        faults = [f"scatters: {line}" for line in scattered]
        fail([*faults, "stop other load on the machine and measure again, or use --force"], FAILED)
    try:
        write_profile(measured, file)
    except OSError as error:
        fail([f"{file}: {error.strerror}"], FAILED)
    _print(measured, file, left_out, len(scattered), output)


def _detect_device(url: str) -> str:
    """Name of this machine's GPU or CPU; exits with code 2 if the engine runs elsewhere."""
    from cleave.local.kubelet import node

    if not _LOCAL_URL.match(url):
        fail([f"{url} is another machine: name its GPU with --device"], BAD_INPUT)
    gpus = node.inspect_node().gpus
    if gpus:
        return gpus[0].name
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "CPU"


async def _measure(
    url: str, api_key: str | None, model: str | None, settings: "ProfilingSettings"
) -> tuple["EngineInfo", "SamplesByCase", list[str]]:
    from cleave.local.status import find_engine_key
    from cleave.profiling.client import OpenAIClient
    from cleave.profiling.engine_info import inspect_engine
    from cleave.profiling.measurement_plan import measure
    from cleave.rpc.engine_key import build_headers

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if _LOCAL_URL.match(url):
        headers |= build_headers(await find_engine_key(url))
    client = OpenAIClient(url, headers=headers)
    engine = await inspect_engine(client, model)
    with show_progress("probing") as show:
        named = replace(client, model=engine.model)
        return engine, *await measure(named, engine, settings, show)


def _print(
    measured: "MeasuredProfile",
    file: Path,
    left_out: list[str],
    scattered: int,
    output: TableFormat,
) -> None:
    if output is TableFormat.JSON:
        from cleave.perf.profile.codec import encode

        content = {"file": str(file), "leftOut": left_out, "profile": encode(measured)}
        typer.echo(json.dumps(content, indent=1))
        return
    from rich.console import Console

    from cleave.cli.output.tables import print_full_width, print_line

    console = Console(highlight=False)
    print_line(console, f"{measured.model} on {measured.device}", style="bold")
    print_full_width(console, _build_table(measured))
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    if scattered:
        points = f"{scattered} points scatter too much"
        console.print(f"{points}: measure again before planning with it")
    console.print(f"written to {file}", soft_wrap=True)


def _build_table(measured: "MeasuredProfile") -> "Table":
    from cleave.cli.output.tables import build_plain_table

    table = build_plain_table(("ITERATION",), ("MS", "REPEATS", "IQR"))
    rows = [
        *((f"prefill {p.prompts} x {p.tokens}", p) for p in measured.prefill),
        *((f"decode {d.batch}, context {d.context_tokens}", d) for d in measured.decode),
        *(
            (f"prefill {m.prompt_tokens} with decode {m.batch}, context {m.context_tokens}", m)
            for m in measured.mixed
        ),
    ]
    for name, point in rows:
        spread = f"{point.spread_ms / point.ms:.1%}"
        table.add_row(name, f"{point.ms:.2f}", str(point.repeats), spread)
    table.add_row("HTTP and API server, per request", f"{measured.dispatch_ms:.2f}", "", "")
    return table
