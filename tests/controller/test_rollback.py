"""After a roll-back the operator reads objects that a later version of itself has written.

CRDs do not go back (docs/operate.md), so unknown fields and values are still there.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.plan import SelectedPlan
from cleave.controller.cluster.actions import Apply, Delete, PatchStatus
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.replan.inputs import PlanInputs
from cleave.controller.views import TrafficDemand
from cleave.manifests.labels import Manifest
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.controller.test_convergence import ControlPlane, control_plane, ready
from tests.support.deployment_views import (
    INVENTORY,
    NOW_S,
    POOLS,
    deployment,
    format_timestamp,
    status,
    traffic,
    view,
)
from tests.support.fake_cluster import manual_placement
from tests.support.previous_version import REPOSITORY, extract

SCALED = {"roles": [{"role": role, "maxReplicas": 4} for role in ("prefill", "decode")]}
LATER = {"laterField": {"laterValue": 1}}


def written_status(resource: Any) -> Manifest:
    """A status in which everything is recorded that the operator reads again."""
    inputs = PlanInputs(resolve_in_cluster(resource), INVENTORY)
    at = format_timestamp(NOW_S - 400)
    law = {"workers": 1, "perRate": 0.25, "base": 0.0, "lowestRate": 0.0}
    past = {"at": at, "verdict": "Applied", "reason": "r", "pools": POOLS, "left": POOLS}
    recorded = status(resource)
    recorded["plan"] |= {"growth": law, "verdict": "Disaggregate", "algorithm": "high-affinity"}
    return {
        **recorded,
        "plans": [past],
        "correction": {"prefill": 1.1, "decode": 1.0, "numRequests": 9, "of": inputs.model_hash},
        "prediction": {"at": at, "attainment": 0.9, "error": 0.1},
        "observed": {"at": at, "windowS": 60.0, "rate": 4.0},
        "basis": {
            "workload": {"rate": 4.0, "promptTokens": {"mean": 300}, "outputTokens": {"mean": 30}},
            "of": inputs.workload_hash,
        },
    }


def list_objects(value: Any) -> Iterator[Manifest]:
    """All objects inside `value`, itself included."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from list_objects(each)
    elif isinstance(value, list):
        for each in value:
            yield from list_objects(each)


def add_fields(value: Manifest) -> Manifest:
    """With an unknown field in each object."""
    changed = copy.deepcopy(value)
    for each in list(list_objects(changed)):
        each |= copy.deepcopy(LATER)
    return changed


@pytest.mark.parametrize("scaling", [{}, SCALED])
def test_unknown_fields_of_a_status_change_nothing(scaling: Manifest) -> None:
    resource = deployment(scaling=scaling)
    before = written_status(resource)
    # As it is while the planner works on other inputs: the plan in the status stays in force.
    for digest in (before["plan"]["inputs"], "other"):
        before["plan"]["inputs"] = digest
        demand = TrafficDemand(4.0, 4.0, 1, 0)
        known = view(resource, before, windows=traffic(4.0), demand=demand)
        later = replace(known, status=add_fields(before))
        kinds = [
            [type(each) for each in reconcile(each_view) if isinstance(each, Apply | Delete)]
            for each_view in (known, later)
        ]
        assert kinds[0] == kinds[1]
        replicas = [
            {
                each.manifest["metadata"]["name"]: each.manifest["spec"]["replicas"]
                for each in reconcile(each_view)
                if isinstance(each, Apply) and each.manifest["kind"] == "InstancePool"
            }
            for each_view in (known, later)
        ]
        assert replicas[0] == replicas[1]
        # What is written then, a plan with its unknown fields too, is not written again.
        (written,) = (each for each in reconcile(later) if isinstance(each, PatchStatus))
        again = reconcile(replace(later, status=written.status))
        assert not [each for each in again if isinstance(each, PatchStatus)]


RESOURCE = deployment(scaling=SCALED)
STATUS = written_status(RESOURCE)
NUM_OBJECTS = len(list(list_objects(STATUS)))


@given(
    number=st.integers(0, NUM_OBJECTS - 1),
    value=st.sampled_from(["encode", 7, None, [], {"a": 1}, "Someday"]),
    data=st.data(),
)
@settings(max_examples=300)
def test_unknown_values_of_a_status_end_nothing(number: int, value: Any, data: Any) -> None:
    changed = copy.deepcopy(STATUS)
    target = list(list_objects(changed))[number]
    fields = [name for name in target if name not in ("plan", "conditions", "plans")]
    field = data.draw(st.sampled_from([f for f in fields if f in OPEN_FIELDS] or ["laterField"]))
    target[field] = value
    known = view(RESOURCE, STATUS, windows=traffic(4.0), demand=TrafficDemand(4.0, 4.0, 1, 0))
    actions = reconcile(replace(known, status=changed))
    assert not [each for each in actions if isinstance(each, Delete)]


OPEN_FIELDS = {"role", "verdict", "algorithm", "reason", "growth", "parallelism", "correction"}
"""Fields whose values a later version may add to."""


def test_a_plan_that_cannot_be_read_leaves_the_instances_and_is_made_again() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=2))
    here.converge()
    written = here.cluster.get("LLMDeployment", "chat")
    plan = {**written["status"]["plan"], "pools": [{"role": "encode", "replicas": 1}]}
    here.cluster._changed({**written, "status": {**written["status"], "plan": plan}}, is_spec=False)
    before = {pod["metadata"]["uid"] for pod in here.cluster.pods()}
    here.converge()
    assert {pod["metadata"]["uid"] for pod in here.cluster.pods()} == before
    after = here.cluster.get("LLMDeployment", "chat")["status"]["plan"]
    assert SelectedPlan.model_validate(after, by_alias=True).pools[1].replicas == 2


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"laterField": 1}, id="a field"),
        pytest.param({"engine": {"type": "Emulated", "laterField": 1}}, id="a field inside"),
        pytest.param({"owner": "Somebody"}, id="a value"),
    ],
)
def test_pools_of_a_later_version_are_written_anew_and_stay_served(later: Manifest) -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=2))
    here.converge()
    for name in ("chat-prefill", "chat-decode"):
        here.cluster.edit("InstancePool", name, **later)
    fewest = watch_fewest(here)
    here.converge()
    for pool in here.cluster.all("InstancePool"):
        assert not later.items() & pool["spec"].items()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    assert min(fewest) >= 3


def list_new_defaults(present: Manifest, previous: Manifest, path: str) -> Iterator[str]:
    """Fields that the API server writes into objects and the previous version does not know."""
    known = previous.get("properties", {})
    for name, field in present.get("properties", {}).items():
        if name in known:
            yield from list_new_defaults(field, known[name], f"{path}.{name}")
        elif "default" in field:
            yield f"{path}.{name}"
    if "items" in present and "items" in previous:
        yield from list_new_defaults(present["items"], previous["items"], f"{path}[]")


def test_crds_write_no_field_that_the_previous_version_refuses(tmp_path: Path) -> None:
    previous = extract(tmp_path)
    for file in sorted((REPOSITORY / "crds").iterdir()):
        schemas = [
            yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            for path in (file, previous.crds / file.name)
        ]
        specs = [schema["properties"]["spec"] for schema in schemas]
        assert list(list_new_defaults(*specs, "spec")) == []


def watch_fewest(here: ControlPlane) -> list[int]:
    """The number of pods that run, after each change."""
    seen: list[int] = []

    def count(_kind: str, _each: Manifest) -> None:
        pods = here.cluster.pods()
        seen.append(sum("deletionTimestamp" not in pod["metadata"] for pod in pods))

    here.cluster.watchers.append(count)
    return seen


def test_a_deployment_with_an_unknown_field_keeps_what_runs_and_says_so() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=1))
    here.converge()
    pods = {pod["metadata"]["uid"] for pod in here.cluster.pods()}
    here.cluster.edit("LLMDeployment", "chat", laterField=1)
    here.converge()
    assert {pod["metadata"]["uid"] for pod in here.cluster.pods()} == pods
    conditions = here.cluster.get("LLMDeployment", "chat")["status"]["conditions"]
    (found,) = (each for each in conditions if each["type"] == "Ready")
    assert found["reason"] == "Invalid"
    assert "laterField: unknown field" in found["message"]
    # A lost pod is replaced all the same: its pool is valid.
    here.cluster.lose(here.cluster.pods()[0])
    here.converge()
    assert len(here.cluster.pods()) == 2
