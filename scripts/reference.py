"""Writes docs/reference: `python scripts/reference.py OUTDIR` (scripts/generate).

The code is the only source: pages are generated from resource types, command lines, metric
collectors and routes. The script is outside both packages because it imports both.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from prometheus_client.metrics_core import Metric

from cleave.api.cluster import Cluster
from cleave.api.crd import Schema, build_structural_schema
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import RESERVED_FLAGS
from cleave.api.pods.engine_flags import MANAGED, EngineFlag, load_parser
from cleave.api.pool import InstancePool
from cleave.api.resource import API_VERSION
from cleave.cli.main import app
from cleave.controller import main as operator
from cleave.controller import metrics as operator_metrics
from cleave.controller.author_policy.engine_flags import find_risk
from cleave.gateway import main as gateway
from cleave.gateway.http.engine_fields import (
    ARGUMENT_RULES,
    FIELD_RULES,
    HEADER_RULES,
    MEMBER_RULES,
    READ_BY_GATEWAY,
    VLLM_FIELDS,
    FieldRule,
    list_names,
)
from cleave.gateway.metrics import gateway_metrics, instance_metrics
from cleave.gateway.metrics.gateway_families import list_families
from cleave.perf.hardware.gpu import CATALOGUE, PRICE_SOURCE
from cleave.router.registry import InstanceRegistry
from cleave.rpc import agent_discovery
from cleave.time_slices import run_at_once
from cleave_worker.agent import config as agent
from cleave_worker.agent import worker_node
from cleave_worker.emulator import main as emulator
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.metrics import EngineMetricsCollector as EmulatorCollector

_HEADER = "<!-- Generated from the code by scripts/generate; changes here are lost. -->\n"

Lines = Iterator[str]


def main(argv: Sequence[str]) -> int:
    """Write all pages into the folder argv[0]; 2 when the usage is wrong."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        sys.stderr.write("usage: python scripts/reference.py OUTDIR\n")
        return 2
    os.environ.pop(agent_discovery.ENV, None)  # it would be printed as a default
    for name, page in PAGES.items():
        text = _HEADER + "\n".join(page()) + "\n"
        (Path(argv[0]) / f"{name}.md").write_text(text)
    return 0


def resources() -> Lines:
    """The page of all fields of both resources."""
    yield "# Resources"
    yield ""
    yield f"Both are of `{API_VERSION}`. Unknown fields are refused. A field without a default and"
    yield "without **required** may be left out; its text says what follows."
    seen: dict[str, str] = {}
    for model in (LLMDeployment, InstancePool):
        schema = build_structural_schema(model)
        yield from ("", f"## {model.__name__}", "", schema["description"])
        yield from _rules(schema)
        for part in ("spec", "status"):
            yield from _object(f"{model.__name__}.{part}", schema["properties"][part], seen)


def cluster() -> Lines:
    """The page of the cluster file, and of the GPUs that need no description in it."""
    yield from ("# Cluster file", "")
    yield "The machines for `cleave plan`, `simulate`, `validate`, `provision` and `rollout`"
    yield "(`--cluster`): one YAML object, no Kubernetes resource. Unknown fields are refused. In a"
    yield "cluster the operator reads the nodes."
    schema = build_structural_schema(Cluster)
    yield from _object("Cluster", schema, {})
    yield from ("", "## Known GPUs", "")
    yield "Names for `gpu`, without regard to case and punctuation. Rates are dense, bandwidths"
    yield f"one way. Prices: {PRICE_SOURCE};"
    yield "`spec.planning.gpus[].pricePerHour` of a deployment replaces them."
    yield ""
    columns = ("name", "also", "memory GiB", "GB/s", "16-bit TFLOP/s", "W", "USD/H")
    rows = [
        (
            f"`{gpu.name}`",
            ", ".join(f"`{label}`" for label in gpu.labels),
            *(f"{n:g}" for n in (gpu.memory_gib, gpu.memory_gbps, gpu.dense_tflops)),
            f"{gpu.power_watts:g}",
            f"{gpu.price_per_hour:.2f}",
        )
        for gpu in CATALOGUE
    ]
    yield from _table(columns, rows)


def cli() -> Lines:
    """The page of the `cleave` command, including the commands with separate parsers."""
    command = typer.main.get_command(app)
    yield from ("# The `cleave` command", "", *_prose(command.help))
    yield ""
    yield "Exit codes: 0 success, 1 the command failed, 2 invalid input, 130 interrupted by Ctrl-C."
    yield from _command("cleave", command)
    parsers = {"gateway": gateway._build_parser(), "operator": operator._build_parser("")}
    for name, child in command.commands.items():  # type: ignore[attr-defined]
        yield from ("", f"## cleave {name}", "", *_prose(child.help))
        if name in parsers:
            yield from _parser(parsers[name])
        elif hasattr(child, "commands"):
            for part, grandchild in child.commands.items():
                yield from ("", f"### cleave {name} {part}", "", *_prose(grandchild.help))
                yield from _command(f"cleave {name} {part}", grandchild)
        else:
            yield from _command(f"cleave {name}", child)


def worker() -> Lines:
    """The page of the flags of the worker agent and of the emulated engine."""
    yield "# Worker command lines"
    yield ""
    yield "Pods run these; `cleave up --dry-run` prints the command line of each."
    yield from ("", "## python -m cleave_worker.agent.main", "")
    yield f"{agent._build_parser({}).description}"
    yield ""
    yield "Exit codes: 0 drained; 2 bad usage or cores that another engine holds; 1 anything else."
    yield from _parser(agent._build_parser({}))
    yield from (
        "",
        "## python -m cleave_worker.agent.worker_node",
        "",
        *_module(worker_node.__doc__),
    )
    yield from _parser(worker_node._build_parser())
    yield from ("", "## python -m cleave_worker.emulator.main", "", *_module(emulator.__doc__))
    yield from _parser(emulator.build_parser())


def metrics() -> Lines:
    """The page of all metrics."""
    yield "# Metrics"
    yield ""
    yield "## Gateway, `GET /metrics`"
    yield ""
    yield "Durations in seconds. The `process_` metrics of prometheus_client are there as well."
    counted = list_families(gateway_metrics.GatewayMetrics())
    fleet = run_at_once(instance_metrics.collect_instances(InstanceRegistry()))
    hits = instance_metrics.build_hit_families((), (), ())
    rows = [
        (f"`{each.name}`", each.kind, _labels(each.labels), each.text)
        for each in (*counted, *fleet, *hits)
    ]
    yield ""
    yield from _table(("name", "type", "labels", "meaning"), rows)
    yield from ("", f"TTFT buckets (s): {_numbers(gateway_metrics.TTFT_BOUNDS_S)}.")
    yield from ("", f"TPOT buckets (s): {_numbers(gateway_metrics.TPOT_BOUNDS_S)}.")
    yield ""
    yield "## Operator, `GET /metrics`"
    yield ""
    yield "Durations in seconds. The `process_` metrics of prometheus_client are there as well."
    operated = operator_metrics.OperatorCollector(
        operator_metrics.OperatorMetrics(), queued=int, objects=dict, is_leading=bool, statuses=dict
    )
    yield from _families(operated.collect(), texts=True)
    yield ""
    yield "## Emulated engine, `GET /metrics`"
    yield ""
    yield "Those of vLLM that the emulation has, under vLLM's names and with its buckets."
    engine = EmulatedEngine(emulator.parse(["--model", "facebook/opt-13b"], {}).engine)
    collector = EmulatorCollector("", engine.metrics, engine.collect_gauges, engine.cache_config)
    yield from _families(collector.collect())
    yield ""
    yield "## vLLM and the agent"
    yield ""
    yield "vLLM's own page is at `GET /metrics` of each engine (its URL is in `cleave status`). The"
    yield "agent has no page: what it knows goes to routers and `cleave status` over gRPC"
    yield "(`proto/cleave/rpc/v1/agent.proto`: Registration, LoadReport)."


def request_fields() -> Lines:
    """The page of what the gateway does with what clients send."""
    yield from ("# Fields of requests", "")
    yield f"What vLLM {VLLM_FIELDS.version} reads from requests, and what the gateway does with it"
    yield "(`cleave.gateway.http.engine_fields`). Fields that a path's table lacks are removed."
    yield "A checked value passes within its limits; otherwise the request is refused (400)."
    shared: dict[tuple[str, ...], list[str]] = {}
    for path, names in VLLM_FIELDS.paths.items():
        shared.setdefault(names, []).append(f"`{path}`")
    for names, paths in shared.items():
        yield from ("", f"## {', '.join(paths)}", "")
        yield from _describe_rules(FIELD_RULES, {*names, *READ_BY_GATEWAY})
    for title, rules, names in (
        ("Members of fields", MEMBER_RULES, VLLM_FIELDS.members),
        ("Arguments in `vllm_xargs`", ARGUMENT_RULES, list_names(ARGUMENT_RULES)),
        ("Header fields", HEADER_RULES, VLLM_FIELDS.headers),
    ):
        yield from ("", f"## {title}", "")
        yield from _describe_rules(rules, set(names))
    yield from ("", "Other arguments pass, if they are scalars or lists of scalars.")


def engine_flags() -> Lines:
    """The page of what admission does with the flags of engines."""
    vllm = load_parser("vLLM")
    yield from ("# Flags of engines", "")
    yield f"All flags of {vllm.engine}'s parser, and what becomes of them in `spec.engine.args`."
    yield "Values are checked as the parser checks them, before a pod is created. Flags it does"
    yield "not have are refused with the nearest name; with an `engine.image` of your own that is a"
    yield "warning. With the chart's `policy.profile: Restricted` flags that could do what the last"
    yield "column says have to be in `policy.allow.args`."
    yield ""
    rows = [
        (f"`{name}`", _describe_value(flag), _describe_treatment(name), find_risk(name))
        for name, flag in vllm.flags.items()
    ]
    yield from _table(("flag", "value", "in `spec.engine.args`", "profile Restricted"), rows)


def _describe_value(flag: EngineFlag) -> str:
    if flag.values == 0:
        return "none, also `--no-...`" if flag.negated else "none"
    kinds = {"": "text", "int": "whole number", "humanInt": "whole number, such as 8k"}
    kinds |= {"float": "number", "json": "JSON", "object": "JSON object"}
    kind = {**kinds, "objectOrText": "text or JSON object"}[flag.kind]
    value = ", ".join(flag.choices or flag.names) or kind
    return f"one or more: {value}" if flag.values == "+" else value


def _describe_treatment(name: str) -> str:
    if name in RESERVED_FLAGS:
        return "refused: Cleave sets it"
    if name.startswith("--data-parallel"):
        return "refused: `parallelism.data` sets it"
    return f"refused: {MANAGED[name]}" if name in MANAGED else "taken"


def _describe_rules(rules: Iterable[FieldRule], names: set[str]) -> Lines:
    rows = [
        (
            ", ".join(f"`{name}`" for name in sorted(rule.names & names)),
            rule.treatment.value,
            rule.reason,
        )
        for rule in rules
        if rule.names & names
    ]
    yield from _table(("names", "treatment", "why"), rows)


PAGES: dict[str, Callable[[], Lines]] = {
    "resources": resources,
    "cluster": cluster,
    "cli": cli,
    "worker": worker,
    "metrics": metrics,
    "request-fields": request_fields,
    "engine-flags": engine_flags,
}


def _object(path: str, schema: Schema, seen: dict[str, str]) -> Lines:
    """A heading, a table of fields, nested objects; `seen`: printed schemas and their paths."""
    yield from ("", f"### {path}", "", schema["description"])
    earlier = seen.setdefault(str(schema), path)
    if earlier != path:
        yield from ("", f"The same as `{earlier}`.")
        return
    yield ""
    required = schema.get("required", ())
    rows = [
        (f"`{name}`", _type(field), _default(field, name in required), field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    yield from _table(("field", "type", "default", "meaning"), rows)
    yield from _rules(schema)
    for name, field in schema["properties"].items():
        if "properties" in field:
            yield from _object(f"{path}.{name}", field, seen)
        elif "properties" in field.get("items", {}):
            yield from _object(f"{path}.{name}[]", field["items"], seen)


def _rules(schema: Schema) -> Lines:
    rules = schema.get("x-kubernetes-validations", ())
    if rules:
        yield from ("", "Rules:", "")
    for rule in rules:
        field = rule.get("fieldPath", "").removeprefix(".")
        yield f"- `{field}` {rule['message']}" if field else f"- {rule['message']}"


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = {"object": "object", "string": "text", "array": "list", "integer": "whole number"}
    type_name: str = field.get("type", "text or object")
    name = kind.get(type_name, type_name)
    if "items" in field:
        name = f"list of {_type(field['items']).replace('object', 'objects')}"
    elif isinstance(field.get("additionalProperties"), dict):
        name = f"map of text to {_type(field['additionalProperties'])}"
    return " ".join([name, *_bounds(field)])


def _bounds(field: Schema) -> Lines:
    if "minimum" in field:
        yield f"{'>' if field.get('exclusiveMinimum') else '>='} {field['minimum']}"
    if "maximum" in field:
        yield f"<= {field['maximum']}"
    if "maxItems" in field:
        yield f"({field.get('minItems', 0)} to {field['maxItems']})"


def _default(field: Schema, required: bool) -> str:
    if required:
        return "**required**"
    default = field.get("default")
    if default in (None, "", [], {}):
        return ""
    return f"`{default}`"


def _command(name: str, command: Any) -> Lines:  # noqa: ANN401 - typer's own click
    context = typer.Context(command, info_name=name)
    records = (parameter.get_help_record(context) for parameter in command.params)
    rows = [(f"`{names}`", text) for names, text in filter(None, records)]
    yield ""
    yield from _table(("option", "meaning"), rows)


def _parser(parser: argparse.ArgumentParser) -> Lines:
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions:
            continue
        if group.title != "options":
            yield from ("", f"{(group.title or '').capitalize()}:".replace("Vllm", "vLLM"))
        yield ""
        rows = [(f"`{_flags(action)}`", _describe_option(action)) for action in actions]
        yield from _table(("option", "meaning"), rows)
    if parser.epilog:
        yield ""
        yield parser.epilog


def _flags(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices:
        return f"{names} {'|'.join(map(str, action.choices))}"
    return f"{names} {action.metavar or action.dest.split('_')[-1].upper()}"


def _describe_option(action: argparse.Action) -> str:
    default = getattr(action.default, "value", action.default)
    if isinstance(default, tuple):
        default = ",".join(default)
    text = action.help or ""
    if action.required:
        return f"{text} **required**".strip()
    if default in (None, "", False) or "default" in text:
        return text
    if isinstance(default, int) and default >= 1 << 20:
        default = f"{default >> 20}MiB"
    return f"{text} (default {default})".strip()


def _families(families: Iterable[Metric], *, texts: bool = False) -> Lines:
    rows = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = _labels(getattr(family, "_labelnames", ()))
        documentation = (family.documentation,) if texts else ()
        rows.append((f"`{name}`", family.type, labels, *documentation))
    yield ""
    yield from _table(("name", "type", "labels", "meaning")[: 4 if texts else 3], rows)


def _labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    yield "| " + " | ".join(heading) + " |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


def _prose(text: str | None) -> list[str]:
    """Lines of a help text; the examples, which follow click's backspace, as code."""
    prose, _, examples = (text or "").strip().partition("\b\n")
    lines = prose.strip().splitlines()
    if not examples:
        return lines
    heading, *commands = examples.splitlines()
    return [*lines, "", heading, "", "```", *(line.removeprefix("  ") for line in commands), "```"]


def _module(text: str | None) -> list[str]:
    """The first paragraph of a module's docstring."""
    return _prose((text or "").split("\n\n")[0])


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
