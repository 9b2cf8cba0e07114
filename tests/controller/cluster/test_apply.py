"""Hashes of what is applied."""

import pytest

from cleave.api.engine import Connector, EngineSpec
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.pool import InstancePool, InstancePoolStatus
from cleave.controller.cluster.apply import hash_template, is_same_status

from tests.support.node_terms import PREFERRED, REQUIRED

TEMPLATE_WITHOUT_ADAPTERS = "544132b11acb"
"""Of `build_pool()`, as an operator writes it to whom pools have no adapters: another hash would
replace all pods at an upgrade."""


def build_pool(
    replicas: int = 1, adapters: tuple[dict[str, str], ...] = (), **engine: str
) -> InstancePool:
    return InstancePool.model_validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "InstancePool",
            "metadata": {"name": "chat-decode"},
            "spec": {
                "deployment": "chat",
                "role": "decode",
                "replicas": replicas,
                "adapters": list(adapters),
                "revision": "r",
                "model": "facebook/opt-13b",
                "engine": {"image": "registry.example/vllm:1", **engine},
            },
        }
    )


def test_the_template_changes_with_the_connector_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_template(build_pool())
    assert hash_template(build_pool(replicas=3, connector="Cleave")) == before
    assert hash_template(build_pool(connector="Nixl")) != before
    # As in a version with another default.
    monkeypatch.setattr(EngineSpec, "kv_connector", Connector.NIXL)
    assert hash_template(build_pool()) != before


def test_the_template_does_not_depend_on_adapters_and_is_that_of_the_version_before() -> None:
    loaded = hash_template(build_pool(adapters=({"name": "sql", "source": "/data/sql"},)))
    assert loaded == hash_template(build_pool()) == TEMPLATE_WITHOUT_ADAPTERS


def test_nodes_that_pods_need_or_prefer_are_part_of_the_template() -> None:
    term = {"matchExpressions": [{"key": "rack", "operator": "Exists"}]}
    required = {REQUIRED: {"nodeSelectorTerms": [term]}}
    preferred = {PREFERRED: [{"weight": 1, "preference": term}]}
    pool = build_pool()
    hashes = {hash_template(pool)}
    for nodes in (required, preferred, {**required, **preferred}):
        template = WorkerTemplate.model_validate({"affinity": {"nodeAffinity": nodes}})
        spec = pool.spec.model_copy(update={"template": template})
        hashes.add(hash_template(pool.model_copy(update={"spec": spec})))
    assert len(hashes) == 4


def test_unknown_fields_of_a_later_version_make_no_difference_between_statuses() -> None:
    written = {"observedGeneration": 1, "laterField": 1}
    assert is_same_status(InstancePoolStatus, written, dict(written))
    assert is_same_status(InstancePoolStatus, {"observedGeneration": 1}, written)
    assert not is_same_status(InstancePoolStatus, {"observedGeneration": 2}, written)
