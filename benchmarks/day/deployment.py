"""The deployment that is compared, in each mode; and the planner's answer for a phase."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traffic import Lengths, Phase

from cleave.api.deployment import LLMDeployment
from cleave.manifests.pool import build_selected_plan
from cleave.planner import plan_search, problem_from_profile
from cleave.planner.placement import Placement
from cleave.planner.resolved_deployment import resolve_in_cluster

NAME = "day"
PROFILE, MODEL = "distserve/opt-66b/tp4", "facebook/opt-66b"
GPUS_PER_INSTANCE, INSTANCES = 4, 8
INSTANCE_CPUS = 3.5
"""Requested from the node, so that as many fit as their GPUs would; they take far less."""
MAX_MODEL_LEN = 8192
TTFT_MS, TPOT_MS = 2000.0, 50.0
"""Of the trace."""
NODE_ROLE = "cleave.example/role"
WORKER_NODE = "worker"

Pools = list[dict[str, Any]]
"""As in spec.placement.manual."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What may follow the traffic."""

    name: str
    flips: bool
    replans: bool
    text: str


MODES = {
    mode.name: mode
    for mode in (
        Mode("static", False, False, "the best plan for the first hour, all day"),
        Mode("flips", True, False, "the same plan; pools lend each other instances"),
        Mode("replans", False, True, "plans follow the traffic"),
        Mode("both", True, True, "plans follow the traffic, pools lend: the default"),
    )
}
ORACLE = "oracle"
"""The best plan of each phase, there from the phase's first request."""


def make_spec(time_scale: float) -> dict[str, Any]:
    """What all modes have in common."""
    return {
        "model": {"source": MODEL, "servedName": NAME, "maxModelLen": MAX_MODEL_LEN},
        "slo": {"ttftMs": TTFT_MS * time_scale, "tpotMs": TPOT_MS * time_scale},
        "engine": {
            "type": "Emulated",
            "emulated": {"latency": PROFILE, "timeScale": time_scale},
        },
        "template": {
            "nodeSelector": {NODE_ROLE: WORKER_NODE},
            "tolerations": [{"key": NODE_ROLE, "operator": "Exists"}],
            "resources": {"requests": {"cpu": str(INSTANCE_CPUS)}, "limits": {"memory": "2Gi"}},
            "drainTimeoutS": 60,
        },
        "gateway": {"replicas": 2},
        "rollout": {"pendingTimeoutS": 20},
    }


def make_workload(phase: Phase, lengths: Mapping[str, Lengths], time_scale: float) -> Any:
    """What is known of a phase's traffic, as the clock on the wall has it."""
    workload = lengths[phase.service].to_workload(phase)
    return workload | {"rate": phase.rate / time_scale}


def plan(workload: Any, time_scale: float, instances: int) -> Pools:
    """The planner's best placement on that many instances; the nearest one where none will do."""
    spec = make_spec(time_scale) | {"workload": workload, "planning": {"maxGPUs": instances}}
    deployment = LLMDeployment.model_validate(wrap(spec))
    result = plan_search.plan(problem_from_profile.build_problem(deployment))
    placed = build_selected_plan(
        resolve_in_cluster(deployment), Placement(result.best.pools, result.reason, result)
    )
    # The planner counts emulated instances as GPUs; a placement by hand knows no such kind.
    return [
        pool.model_dump(mode="json", exclude={"gpu"}, exclude_none=True, by_alias=True)
        for pool in placed.pools
    ]


def placed(pools: Pools, time_scale: float, *, flips: bool) -> dict[str, Any]:
    """A deployment that is placed by hand."""
    spec = make_spec(time_scale) | {
        "placement": {"manual": pools},
        "pools": {"flipping": "Auto" if flips else "Off"},
    }
    return wrap(spec)


def planned(workload: Any, time_scale: float, interval_s: int, *, flips: bool) -> dict[str, Any]:
    """A deployment that follows its traffic from a first statement on."""
    spec = make_spec(time_scale) | {
        "workload": workload,
        "planning": {
            "maxGPUs": INSTANCES,
            "replan": {"mode": "Auto", "intervalS": interval_s},
        },
        "pools": {"flipping": "Auto" if flips else "Off"},
    }
    return wrap(spec)


def wrap(spec: dict[str, Any]) -> dict[str, Any]:
    """The whole resource."""
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def say(pools: Pools) -> str:
    """Such as `4P 1D`."""
    return " ".join(f"{pool.get('replicas', 1)}{pool['role'][0].upper()}" for pool in pools)
