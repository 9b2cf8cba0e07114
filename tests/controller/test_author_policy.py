"""What authors of deployments and pools may ask for, in the webhook and in the reconcile."""

from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.api.pool import InstancePool
from cleave.controller.author_policy import AuthorPolicy, list_violations
from cleave.controller.webhook.admission import check_resource

from tests.support.fake_cluster import chat

STRICT = AuthorPolicy(
    allows_host_paths=False,
    allows_host_network=False,
    allows_secrets=False,
    allowed_images=("registry.example/",),
    denied_engine_args=("--trust-remote-code", "--hf_overrides"),
)
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}


def build_deployment(**spec: Any) -> LLMDeployment:
    return validate(chat(engine={"type": "vLLM", **spec.pop("engine", {})}, **spec))


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"engine": {"image": "docker.io/x"}}, "spec.engine.image: .* begin with registry.example"),
        ({"gateway": {"image": "docker.io/x"}}, "spec.gateway.image"),
        ({"engine": {"args": ["--trust_remote_code"]}}, "denies --trust-remote-code"),
        ({"engine": {"args": ["--hf-overrides={}"]}}, "denies --hf_overrides"),
        ({"engine": {"args": ["--config=/x.yaml"]}}, "denies --config"),
        ({"engine": {"args": ["--trust-remote"]}}, "denies --trust-remote-code"),
        ({"engine": {"env": [{"name": "T", "valueFrom": SECRET}]}}, "spec.engine.env.T"),
        ({"template": {"hostNetwork": True}}, "spec.template.hostNetwork"),
        (
            {"template": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}},
            "spec.template.volumes.v: .* denies hostPath",
        ),
        (
            {"template": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}},
            "spec.template.volumes.v: .* denies secret",
        ),
        ({"model": "/models/x"}, "spec.model: .* folders of nodes"),
    ],
)
def test_what_the_policy_denies_is_named_and_allowed_without_one(
    spec: dict[str, Any], path: str
) -> None:
    deployment = build_deployment(**spec)
    (fault,) = list_violations(deployment, STRICT)
    assert pytest.importorskip("re").search(path, fault), fault
    assert not list(list_violations(deployment, AuthorPolicy()))
    document = chat(engine={"type": "vLLM", **spec.get("engine", {})}, **{
        key: value for key, value in spec.items() if key != "engine"
    })  # fmt: skip
    assert fault in check_resource(document, None, STRICT).faults


EXPERTS = {"data": 8, "expert": True}


def test_sizes_that_add_a_denied_flag_are_denied() -> None:
    policy = AuthorPolicy(denied_engine_args=("--enable_expert_parallel", "--data-parallel-size"))
    pools = [{"role": "prefill"}, {"role": "decode", "parallelism": EXPERTS}]
    deployment = build_deployment(placement={"manual": pools})
    field = "spec.placement.manual[1].parallelism"
    assert list(list_violations(deployment, policy)) == [
        f"{field}.expert: the operator's policy denies --enable_expert_parallel, which it adds",
        f"{field}.data: the operator's policy denies --data-parallel-size, which it adds",
    ]
    assert not list(list_violations(deployment, AuthorPolicy()))
    assert not list(list_violations(deployment, STRICT))
    spec = {"deployment": "chat", "role": "decode", "revision": "r", "model": "m"}
    named = {"metadata": {"name": "chat-decode"}}
    pool = InstancePool.model_validate({**named, "spec": {**spec, "parallelism": EXPERTS}})
    assert [each.split(":")[0] for each in list_violations(pool, policy)] == [
        "spec.parallelism.expert",
        "spec.parallelism.data",
    ]
    members = [{"role": "decode", "parallelism": {"tensor": 2, "expert": True}}]
    cell = InstancePool.model_validate(
        {**named, "spec": {**spec, "role": "mixed", "members": members}}
    )
    (fault,) = list_violations(cell, policy)
    assert fault.startswith("spec.members[0].parallelism.expert: ")


def test_what_the_policy_allows_passes() -> None:
    spec = {"engine": {"image": "registry.example/worker:1", "args": ["--seed", "1"]}}
    assert not list(list_violations(build_deployment(**spec), STRICT))


@pytest.mark.parametrize("flag", ["--enable-lora", "--lora-modules"])
def test_where_arguments_for_adapters_are_denied_a_list_of_them_is(flag: str) -> None:
    adapters = [{"name": "sql", "source": "/data/sql"}]
    deployment = build_deployment(adapters=adapters, engine={"args": ["--enable-lora"]})
    policy = AuthorPolicy(denied_engine_args=(flag,))
    faults = list(list_violations(deployment, policy))
    assert "spec.adapters: the operator's policy denies LoRA adapters" in faults
    assert not list(list_violations(deployment, AuthorPolicy()))
