"""From options to a question for the planner: shared by `plan` and `simulate`.

What a deployment states may be overridden for one question: rate, trace and targets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cleave import distribution
from cleave.cli.faults import BAD_INPUT, fail

if TYPE_CHECKING:
    from cleave.api.cluster import Cluster
    from cleave.api.deployment import LLMDeployment
    from cleave.planner.problem import Problem

ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="YAML file with the machines: nodes, network, own GPUs, measured profiles.",
        show_default=False,
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="Requests per second, instead of spec.workload.rate.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="CSV or JSONL file of requests, instead of the stated lengths."),
]
TtftTarget = Annotated[
    float | None, typer.Option("--slo-ttft", help="TTFT target in ms, instead of spec.slo.ttftMs.")
]
TpotTarget = Annotated[
    float | None, typer.Option("--slo-tpot", help="TPOT target in ms, instead of spec.slo.tpotMs.")
]
_EXAMPLE = "such as nodes: [{count: 4, gpu: A100-SXM-80GB}]"
Seed = Annotated[int, typer.Option(min=0, help="Of the requests that are drawn.")]


@dataclass(frozen=True, slots=True)
class Overrides:
    """What is asked instead of what the file states."""

    rate: float | None = None
    trace: Path | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A deployment and what the planner makes of it."""

    deployment: "LLMDeployment"
    problem: "Problem"


def ask(file: Path, cluster: Path | None, overrides: Overrides, seed: int) -> Question:
    """Read both files. Ends with exit code 2 and one line per fault."""
    from cleave.api.manifest import ManifestError, load, load_cluster
    from cleave.planner.placement import PlanError, located

    distribution.require("planner")
    try:
        deployment = overridden(located(load(file), file.parent), overrides)
        machines = load_cluster(cluster) if cluster else None
        return Question(deployment, _problem(deployment, machines, file.parent, seed))
    except (ManifestError, PlanError) as error:
        fail(error.faults, BAD_INPUT)


def _problem(
    deployment: "LLMDeployment", machines: "Cluster | None", folder: Path, seed: int
) -> "Problem":
    from cleave.api.engine import EngineType
    from cleave.planner import asking, emulated
    from cleave.planner.placement import PlanError

    if machines is not None:
        return asking.problem(deployment, machines, folder, seed)
    if deployment.spec.engine.type is not EngineType.EMULATED:
        raise PlanError([f"--cluster: is needed: a YAML file with the machines, {_EXAMPLE}"])
    return emulated.problem(deployment, folder, seed)


def overridden(deployment: "LLMDeployment", overrides: Overrides) -> "LLMDeployment":
    """The deployment with another rate, trace or target. Raises ManifestError."""
    from cleave.api.manifest import ManifestError, validate

    if overrides == Overrides():
        return deployment
    spec = deployment.spec.model_dump(mode="json", exclude_none=True)
    traffic: dict[str, Any] = spec.setdefault("workload", {})
    if overrides.trace is not None:
        # Another trace is replayed with its own gaps, unless a rate is asked for.
        is_resampled = overrides.rate is not None and "burstiness" in traffic
        kept = {"burstiness": traffic["burstiness"]} if is_resampled else {}
        traffic = spec["workload"] = {**kept, "trace": {"path": str(overrides.trace.absolute())}}
    if overrides.rate is not None:
        traffic["rate"] = overrides.rate
    for key, value in (("ttftMs", overrides.ttft_ms), ("tpotMs", overrides.tpot_ms)):
        if value is not None:
            spec["slo"][key] = value
    if not traffic:
        del spec["workload"]
    try:
        return validate(
            {
                "apiVersion": deployment.api_version,
                "kind": deployment.kind,
                "metadata": {"name": deployment.name, "namespace": deployment.namespace},
                "spec": spec,
            }
        )
    except ManifestError as error:
        raise ManifestError([_by_option(fault, overrides) for fault in error.faults]) from error


def _by_option(fault: str, overrides: Overrides) -> str:
    """A fault with the option that caused it in place of the field that the file may not have."""
    options = {
        "spec.workload.rate": ("--rate", overrides.rate),
        "spec.workload.trace.path": ("--trace", overrides.trace),
        "spec.slo.ttftMs": ("--slo-ttft", overrides.ttft_ms),
        "spec.slo.tpotMs": ("--slo-tpot", overrides.tpot_ms),
    }
    field, colon, text = fault.partition(":")
    option, value = options.get(field, ("", None))
    return fault if value is None else f"{option}{colon}{text}"
