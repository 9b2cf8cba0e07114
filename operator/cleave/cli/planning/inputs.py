"""The input of the planner from files and options, shared by `plan`, `simulate` and `provision`.

Options may override the rate, the trace and the SLO targets of the manifest.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cleave import distribution
from cleave.cli.output.errors import load_manifest, report_input_errors

if TYPE_CHECKING:
    from cleave.api.cluster import Cluster
    from cleave.api.deployment import LLMDeployment
    from cleave.perf.model.model_shape import ModelShape
    from cleave.planner.problem import Problem
    from cleave.planner.resolved_deployment import ResolvedDeployment

ClusterFile = Annotated[
    Path | None,
    Option(
        help="YAML file of the machines: nodes, network, custom GPUs, measured profiles.",
        show_default=False,
    ),
]
Rate = Annotated[float | None, Option(help="Requests per second. Overrides spec.workload.rate.")]
TraceFile = Annotated[
    Path | None,
    Option(help="CSV or JSON file of requests. Overrides the lengths in spec.workload."),
]
TtftTarget = Annotated[float | None, Option(help="TTFT target in ms. Overrides spec.slo.ttftMs.")]
TpotTarget = Annotated[float | None, Option(help="TPOT target in ms. Overrides spec.slo.tpotMs.")]
ItlTarget = Annotated[
    float | None,
    Option(help="ITL target in ms for 99 % of all tokens. Overrides spec.slo.itlP99Ms."),
]
Seed = Annotated[int, Option(min=0, help="Random seed of the generated requests.")]


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values of options that override those of the manifest; None: not overridden."""

    rate: float | None = None
    trace: Path | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """A deployment and the planning problem built from it."""

    deployment: "LLMDeployment"
    problem: "Problem"


def read_planning_input(
    file: Path, cluster: Path | None, overrides: Overrides, seed: int
) -> PlanningInput:
    """Read both files, and warn of conversations that cannot repeat. Exits with code 2 and one line
    per fault."""
    from cleave.planner.deployment_checks import list_reuse_doubts

    with report_input_errors():
        found = build_planning_input(load_manifest(file), file.parent, cluster, overrides, seed)
    for warning in list_reuse_doubts(found.deployment.spec):
        sys.stderr.write(f"warning: {warning}\n")
    return found


def build_planning_input(
    manifest: "LLMDeployment", folder: Path, cluster: Path | None, overrides: Overrides, seed: int
) -> PlanningInput:
    """The input of the planner; relative paths start at `folder`. Raises ManifestError and
    PlanError."""
    from cleave.api.manifest import load_cluster
    from cleave.planner.placement import resolve_paths

    distribution.require("planner")
    deployment = apply_overrides(resolve_paths(manifest, folder), overrides)
    machines = load_cluster(cluster) if cluster else None
    return PlanningInput(deployment, _build_problem(deployment, machines, folder, seed))


def _build_problem(
    deployment: "LLMDeployment", machines: "Cluster | None", folder: Path, seed: int
) -> "Problem":
    from cleave.api.engine import EngineType
    from cleave.planner import problem_from_cluster, problem_from_profile
    from cleave.planner.placement import PlanError

    if machines is not None:
        return problem_from_cluster.build_problem(deployment, machines, folder, seed)
    if deployment.spec.engine.type is not EngineType.EMULATED:
        why = "is required: a YAML file that describes the machines"
        raise PlanError([f"--cluster: {why}, such as nodes: [{{count: 4, gpu: A100-SXM-80GB}}]"])
    return problem_from_profile.build_problem(deployment, folder, seed)


def check_manual_placement(deployment: "LLMDeployment", cluster: "Cluster", folder: Path) -> None:
    """Raise PlanError where the nodes have no room for spec.placement.manual, and ManifestError
    where the cluster file is wrong. Emulated engines run anywhere. Says over which link KV goes,
    and warns where it is too slow for the SLO."""
    from cleave.api.engine import EngineType
    from cleave.planner.placement import PlanError
    from cleave.planner.resolved_deployment import resolve

    if deployment.spec.placement is None or deployment.spec.engine.type is EngineType.EMULATED:
        return
    distribution.require("planner")
    from cleave.manifests import cluster_fit
    from cleave.planner import deployment_shape

    resolved = resolve(deployment)
    shape = deployment_shape.load_shape(deployment) if resolved.shape else None
    if faults := list(cluster_fit.list_misfits(deployment, cluster, shape)):
        raise PlanError(faults)
    for line in _describe_kv_link(resolved, cluster, shape, folder):
        sys.stderr.write(f"{line}\n")


def _describe_kv_link(
    resolved: "ResolvedDeployment", cluster: "Cluster", shape: "ModelShape | None", folder: Path
) -> Iterator[str]:
    from cleave.manifests import kv_link
    from cleave.manifests.topology import NodeTopology
    from cleave.planner import problem_from_cluster
    from cleave.planner.placement import choose_placement

    placement, nodes = choose_placement(resolved), NodeTopology.from_cluster(cluster)
    link = kv_link.find_kv_link(resolved, placement, cluster, nodes)
    if link is None:
        return
    yield f"note: KV goes over {link.kind}, {link.gb_per_s:.3g} GB/s for each GPU that receives it"
    if shape is None or resolved.spec.workload is None:
        return
    demand = problem_from_cluster.build_demand(resolved.written, folder)
    mean = demand.mean_prompt_tokens
    if why := kv_link.explain_slow_link(resolved, placement, cluster, nodes, shape, mean):
        yield f"warning: spec.placement.manual: {why}"


def apply_overrides(deployment: "LLMDeployment", overrides: Overrides) -> "LLMDeployment":
    """Return the deployment with `overrides` applied. Raises ManifestError."""
    from cleave.api.manifest import ManifestError, validate

    if overrides == Overrides():
        return deployment
    spec = deployment.spec.model_dump(mode="json", exclude_none=True)
    traffic: dict[str, Any] = spec.setdefault("workload", {})
    if overrides.trace is not None:
        # Another trace is replayed with its own arrival times, unless a rate is given.
        is_resampled = overrides.rate is not None and "burstiness" in traffic
        retained = {"burstiness": traffic["burstiness"]} if is_resampled else {}
        path = str(overrides.trace.absolute())
        traffic = spec["workload"] = {**retained, "trace": {"path": path}}
    if overrides.rate is not None:
        traffic["rate"] = overrides.rate
    for key, value in (
        ("ttftMs", overrides.ttft_ms),
        ("tpotMs", overrides.tpot_ms),
        ("itlP99Ms", overrides.itl_p99_ms),
    ):
        if value is not None:
            spec["slo"][key] = value
    if not traffic:
        del spec["workload"]
    manifest = {
        "apiVersion": deployment.api_version,
        "kind": deployment.kind,
        "metadata": dump_metadata(deployment),
        "spec": spec,
    }
    try:
        return validate(manifest)
    except ManifestError as error:
        faults = [_attribute_to_option(fault, overrides) for fault in error.faults]
        raise ManifestError(faults) from error


def dump_metadata(deployment: "LLMDeployment") -> dict[str, Any]:
    """What the manifest has of name, namespace, labels and annotations: without these kubectl
    would remove them from an object."""
    fields = {"name", "namespace", "labels", "annotations"} & deployment.metadata.model_fields_set
    return deployment.metadata.model_dump(mode="json", include=fields)


def _attribute_to_option(fault: str, overrides: Overrides) -> str:
    """The fault with the name of the option that caused it instead of the manifest's field."""
    options = {
        "spec.workload.rate": ("--rate", overrides.rate),
        "spec.workload.trace.path": ("--trace", overrides.trace),
        "spec.slo.ttftMs": ("--slo-ttft", overrides.ttft_ms),
        "spec.slo.tpotMs": ("--slo-tpot", overrides.tpot_ms),
        "spec.slo.itlP99Ms": ("--slo-itl-p99", overrides.itl_p99_ms),
    }
    field, colon, text = fault.partition(":")
    option, value = options.get(field, ("", None))
    return fault if value is None else f"{option}{colon}{text}"
