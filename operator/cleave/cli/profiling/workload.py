"""`cleave workload`: describes traffic as `spec.workload`, or generates similar requests."""

import re
from dataclasses import asdict, dataclass
from os.path import abspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cleave.cli.options import DocumentFormat, DocumentOutput
from cleave.cli.output.errors import BAD_INPUT, fail
from cleave.cli.output.tables import convert_keys, print_json, print_yaml

if TYPE_CHECKING:
    from cleave.api.workload import Workload
    from cleave.simulator.trace import Trace
    from cleave.traffic.characterization import TraceDescription
    from cleave.traffic.workload import Demand

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
_SAMPLE_REQUESTS = 20_000
"""Number of requests generated from distributions to describe them."""


@dataclass(frozen=True, slots=True)
class DescribedTraffic:
    """Traffic from a recording, a published workload or Prometheus."""

    title: str
    trace: "Trace"
    """Recorded or generated requests."""
    demand: "Demand"
    """The distribution that `--sample` generates requests from."""
    recording: Path | None
    """The file of `trace`; None: generated."""
    notes: tuple[str, ...] = ()
    """Source and assumptions, one sentence each."""


def workload(
    source: Annotated[
        str | None,
        Argument(
            help="CSV or JSON file of requests, or a published workload such as chat-1m.",
            autocompletion=lambda incomplete: complete_published(incomplete),
        ),
    ] = None,
    prometheus: Annotated[
        str | None, Option(help="Read from this Prometheus server, http://host:9090.")
    ] = None,
    window: Annotated[
        str, Option(help="Time range to read from Prometheus, such as 30m, 6h or 7d.")
    ] = "1d",
    model: Annotated[
        str | None, Option(help="Read only requests with this name of a model.")
    ] = None,
    rate: Annotated[
        float | None, Option(help="Requests per second. Overrides the recorded rate.")
    ] = None,
    burstiness: Annotated[
        float | None,
        Option(min=0, max=20, help="Coefficient of variation of interarrival times; 1: Poisson."),
    ] = None,
    fitted: Annotated[
        bool,
        Option(
            "--fit", help="Print distributions even where replaying the trace is more accurate."
        ),
    ] = False,
    output: DocumentOutput = DocumentFormat.TABLE,
    sample: Annotated[
        int | None,
        Option(min=1, max=5_000_000, help="Generate this many requests into --output-file."),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Random seed of generated requests.")] = 0,
    file: Annotated[
        Path | None, Option("--output-file", "-O", help="CSV file for --sample.")
    ] = None,
) -> None:
    """Describe recorded traffic and print it as spec.workload of an LLMDeployment.

    Where fitted distributions do not represent a recording, spec.workload refers to the file and
    the trace is replayed. With --prometheus, lengths come from histograms of
    Cleave's gateways, or of vLLM where there are none.

    Exit codes: 0 described or generated, 2 the source cannot be used.

    \b
    Examples:
      # Describe recorded requests
      cleave workload requests.csv
      # Print a published workload at another rate as spec.workload
      cleave workload chat-1m --rate 20 -o yaml
      # Describe the traffic of the last week
      cleave workload --prometheus http://prometheus:9090 --window 7d
      # Generate 5000 similar requests
      cleave workload requests.csv --sample 5000 --rate 12 -O more.csv
    """
    from cleave.traffic.recordings.history_error import HistoryError
    from cleave.traffic.workload import DemandError

    if (source is None) == (prometheus is None):
        fail(["give either a file or a name, or --prometheus URL"], BAD_INPUT)
    if (sample is None) != (file is None):
        fail(["--sample and --output-file must be given together"], BAD_INPUT)
    try:
        if prometheus is None:
            traffic = _read_named(str(source), rate, burstiness)
        else:
            traffic = _read_prometheus(prometheus, _parse_window(window), model, rate, burstiness)
        if sample is not None and file is not None:
            _write_sample(traffic, sample, seed, file)
        else:
            is_other = fitted or rate is not None or burstiness is not None
            _print(traffic, _build_spec(traffic, rate, burstiness, may_replay=not is_other), output)
    except (HistoryError, DemandError) as error:
        fail([str(error)], BAD_INPUT)


def complete_published(incomplete: str) -> list[str]:
    """Names of published workloads for completion; the shell completes files itself."""
    from cleave.traffic import published

    return [name for name in published.list_names() if name.startswith(incomplete)]


def _read_named(source: str, rate: float | None, burstiness: float | None) -> DescribedTraffic:
    """A file if there is one of that name, else a published workload."""
    from cleave.traffic import characterization, history, published, workload

    path = Path(source)
    if path.exists() or path.suffix or "/" in source:
        trace = history.read_trace(path)
        fitted = characterization.fit_workload(trace, rate, burstiness)
        demand = workload.resample_trace(trace, fitted.rate or 1.0, fitted.gap_variation)
        return DescribedTraffic(source, trace, demand, path)
    entry = published.get_workload(source)
    demand = entry.build_demand(rate, _get_burstiness(burstiness))
    notes = (f"from {entry.source}", f"known: {entry.published}", f"assumed: {entry.assumed}")
    return DescribedTraffic(entry.name, demand.draw(_SAMPLE_REQUESTS), demand, None, notes)


def _read_prometheus(
    url: str, window_s: float, model: str | None, rate: float | None, burstiness: float | None
) -> DescribedTraffic:
    import time

    from cleave.traffic import prometheus

    observed = prometheus.read_traffic(url, time.time(), window_s, model)
    demand = observed.build_demand(rate, _get_burstiness(burstiness))
    mean, peak = float(observed.rates.mean()), float(observed.rates.max())
    summary = (
        f"{observed.num_requests:,.0f} requests, {mean:.3g} per second and {peak:.3g} at the peak; "
        f"to meet the SLO there, plan for --rate {peak:.3g}"
    )
    assumed = (
        "assumed: uniform within histogram buckets; prompt and output lengths independent; "
        f"burstiness {_get_burstiness(burstiness):g}"
    )
    beyond = f"{observed.share_beyond:.1%} of requests are longer than the last bucket"
    beyond_notes = [beyond] if observed.share_beyond > 0.001 else []
    notes = (summary, assumed, *observed.remarks, *beyond_notes)
    return DescribedTraffic("Prometheus", demand.draw(_SAMPLE_REQUESTS), demand, None, notes)


def _get_burstiness(burstiness: float | None) -> float:
    return 1.0 if burstiness is None else burstiness


def _build_spec(
    traffic: DescribedTraffic, rate: float | None, burstiness: float | None, *, may_replay: bool
) -> dict[str, Any]:
    """`spec.workload` as in a manifest."""
    from cleave.api.workload import TraceSource, Workload
    from cleave.traffic.characterization import characterize, fit_workload

    if traffic.recording is None:
        rate, burstiness = traffic.demand.rate, _get_burstiness(burstiness)
    elif may_replay and not characterize(traffic.trace).is_fit_good:
        return _build_manifest(Workload(trace=TraceSource(path=abspath(traffic.recording))))
    return _build_manifest(fit_workload(traffic.trace, rate, burstiness))


def _build_manifest(spec: "Workload") -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


def _write_sample(traffic: DescribedTraffic, num: int, seed: int, file: Path) -> None:
    from cleave.traffic import history

    trace = traffic.demand.draw(num, seed=seed)
    history.write_trace(file, trace)
    typer.echo(f"{file}: {num} requests similar to {traffic.title}, {trace.rate:.4g} per second")


def _print(traffic: DescribedTraffic, spec: dict[str, Any], output: DocumentFormat) -> None:
    from cleave.traffic.characterization import characterize

    diagnosis = characterize(traffic.trace)
    warnings = diagnosis.warnings if traffic.recording else _describe_generated(diagnosis)
    remarks = [*traffic.notes, *warnings]
    if output is DocumentFormat.JSON:
        described = {**asdict(diagnosis), "notes": list(traffic.notes)}
        print_json({"workload": spec, "diagnosis": convert_keys(described)})
    elif output is DocumentFormat.YAML:
        typer.echo("".join(f"# {line}\n" for line in remarks), nl=False)
        print_yaml({"workload": spec})
    else:
        from cleave.cli.profiling.workload_table import show

        title = traffic.title if traffic.recording else f"{traffic.title}, generated:"
        show(title, traffic.trace, diagnosis, remarks, spec)


def _describe_generated(diagnosis: "TraceDescription") -> list[str]:
    """A remark if the fit is poor: generated requests can be written to a file and replayed."""
    if diagnosis.is_fit_good:
        return []
    worst = max(diagnosis.prompt_tokens.fit_distance, diagnosis.output_tokens.fit_distance)
    line = (
        f"the block uses log-normal lengths, which are {worst:.0%} off; for exact lengths, write "
        "requests with --sample 10000 -O requests.csv and set workload.trace.path to that file"
    )
    return [line]


def _parse_window(window: str) -> float:
    match = re.fullmatch(r"(\d+)([smhdw])", window.strip())
    if match is None:
        fail([f"--window {window}: must be a number and s, m, h, d or w, such as 6h"], BAD_INPUT)
    return float(match[1]) * _SECONDS[match[2]]
