"""What authors of deployments and pools may have, in the webhook and in the reconcile."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import ManifestError, load, validate
from cleave.api.pool import InstancePool
from cleave.controller.author_policy.allow_lists import NAMES, add_own_images
from cleave.controller.author_policy.violations import build_pods, list_pod_faults, list_violations
from cleave.controller.cluster.actions import PatchStatus
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings
from cleave.controller.webhook.admission import check_resource
from cleave.manifests.multi_node import build_leader_worker_set
from cleave.manifests.network_policies import NetworkIsolation

from tests.support.fake_cluster import chat
from tests.support.node_terms import PREFERRED, REQUIRED
from tests.support.resource_cases import REFUSED, UNUSUAL

ROOT = Path(__file__).parents[3]
ACCOUNT = "system:serviceaccount:cleave-system:cleave-operator"
RESTRICTED = OperatorSettings(
    account=ACCOUNT, isolation=NetworkIsolation("c", 6443), allow_lists={}
)
OPEN = OperatorSettings(account=ACCOUNT)
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}
TERM = {
    "matchExpressions": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]
}


def build_deployment(**spec: Any) -> LLMDeployment:
    return validate(chat(engine={"type": "vLLM", **spec.pop("engine", {})}, **spec))


def build_pool(**spec: Any) -> InstancePool:
    own = {"deployment": "chat", "role": "mixed", "revision": "r", "model": "facebook/opt-125m"}
    document = {"metadata": {"name": "chat-mixed"}, "spec": {**own, **spec}}
    return InstancePool.model_validate_json(json.dumps(document))


def mounted(path: str = "/data/v", **volume: Any) -> dict[str, Any]:
    mounts = [{"name": "v", "mountPath": path}]
    return {"template": {"volumes": [{"name": "v", **volume}], "volumeMounts": mounts}}


def set_env(name: str, value: str = "x") -> dict[str, Any]:
    return {"engine": {"env": [{"name": name, "value": value}]}}


def set_args(*args: str) -> dict[str, Any]:
    return {"engine": {"args": [*args]}}


CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}
WAYS = [
    # Code: by variables, volumes, folders of the image, flags.
    (set_env("PYTHONPATH", "/data"), "spec.engine.env[PYTHONPATH]", "env"),
    (set_env("LD_PRELOAD", "/data/x.so"), "spec.engine.env[LD_PRELOAD]", "env"),
    (set_env("VLLM_PLUGINS"), "spec.engine.env[VLLM_PLUGINS]", "env"),
    (
        set_env("TORCHINDUCTOR_CACHE_DIR", "/data"),
        "spec.engine.env[TORCHINDUCTOR_CACHE_DIR]",
        "env",
    ),
    (set_env("NCCL_NET_PLUGIN", "/data/x.so"), "spec.engine.env[NCCL_NET_PLUGIN]", "env"),
    (set_env("HF_ENDPOINT", "http://evil.example"), "spec.engine.env[HF_ENDPOINT]", "env"),
    (set_env("https_proxy", "http://evil.example"), "spec.engine.env[https_proxy]", "env"),
    (set_env("PATH", "/data"), "spec.engine.env[PATH]", "env"),
    (set_env("HOME", "/data"), "spec.engine.env[HOME]", "env"),
    (set_env("KUBERNETES_SERVICE_HOST"), "spec.engine.env[KUBERNETES_SERVICE_HOST]", "env"),
    (set_env("VLLM_DO_NOT_TRACK", "0"), "spec.engine.env[VLLM_DO_NOT_TRACK]", "env"),
    (set_env("HF_HOME", "/home/cleave"), "spec.engine.env[HF_HOME].value", "folders"),
    (mounted(configMap={"name": "evil"}), "spec.template.volumes[v].configMap.name", "configMaps"),
    (mounted(**CLAIM), "spec.template.volumes[v].persistentVolumeClaim", "volumes"),
    (mounted(image={"reference": "evil.io/x"}), "spec.template.volumes[v].image", "volumes"),
    (mounted("/opt/cleave", emptyDir={}), "spec.template.volumeMounts[v].mountPath", "folders"),
    (mounted("/data/../opt", emptyDir={}), "spec.template.volumeMounts[v].mountPath", ""),
    (
        {"model": {"source": "/usr/lib/x", "cache": CLAIM}},
        "spec.model.source",
        "folders",
    ),
    (set_args("--trust-remote-code"), "spec.engine.args: --trust-remote-code", "args"),
    (set_args("--trust_remote_code"), "spec.engine.args: --trust-remote-code", "args"),
    (set_args("--trust-rem"), "spec.engine.args: --trust-rem", "args"),
    (set_args("--worker-cls=os.system"), "spec.engine.args: --worker-cls", "args"),
    (set_args("--tokenizer-mode", "custom"), "spec.engine.args: --tokenizer-mode", "args"),
    (set_args("--config", "/data/x.yaml"), "spec.engine.args: --config", "args"),
    (
        set_args('--kv-transfer-config={"kv_connector_module_path":"os"}'),
        "spec.engine.args: --kv-transfer-config",
        "args",
    ),
    (set_args("--of-a-later-version"), "spec.engine.args: --of-a-later-version", "args"),
    (set_args("--seed", "1", "evil/model"), "spec.engine.args", ""),
    (set_args("--enforce-eager", "evil/model"), "spec.engine.args", ""),
    (set_args("--seed", "$(NCCL_DEBUG)"), "spec.engine.args", ""),
    ({"engine": {"image": "evil.io/cleave-worker-cuda:0.1.0"}}, "spec.engine.image", "images"),
    ({"gateway": {"image": "evil.io/x"}}, "spec.gateway.image", "images"),
    (
        {"model": {"source": "/models/m", "cache": {"image": {"reference": "evil.io/x"}}}},
        "spec.model.cache.image",
        "volumes",
    ),
    # The network.
    (
        set_args("--allowed-media-domains", "169.254.169.254"),
        "spec.engine.args: --allowed-media-domains",
        "args",
    ),
    ({"engine": {"mediaDomains": ["169.254.169.254"]}}, "spec.engine.mediaDomains", "args"),
    (
        set_args("--otlp-traces-endpoint=http://x"),
        "spec.engine.args: --otlp-traces-endpoint",
        "args",
    ),
    (
        {"gateway": {"tracing": {"endpoint": "http://169.254.169.254"}}},
        "spec.gateway.tracing.endpoint",
        "args",
    ),
    ({"template": {"hostNetwork": True}}, "spec.template.hostNetwork", "fields"),
    (mounted(nfs={"server": "10.0.0.1", "path": "/"}), "spec.template.volumes[v].nfs", "volumes"),
    # Secrets.
    (
        {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": SECRET}]}},
        "spec.engine.env",
        "secrets",
    ),
    ({"engine": {"env": [{"name": "TZ", "valueFrom": SECRET}]}}, "spec.engine.env[TZ]", "secrets"),
    (mounted(secret={"secretName": "db"}), "spec.template.volumes[v].secret", "secrets"),
    (
        mounted(projected={"sources": [{"secret": {"name": "db"}}]}),
        "spec.template.volumes[v].projected.sources[0].secret.name",
        "secrets",
    ),
    (
        mounted(projected={"sources": [{"serviceAccountToken": {"audience": "vault"}}]}),
        "spec.template.volumes[v].projected.sources[0].serviceAccountToken.audience",
        "",
    ),
    (mounted(azureFile={"secretName": "db"}), "spec.template.volumes[v].azureFile", "volumes"),
    (mounted(csi={"driver": "x"}), "spec.template.volumes[v].csi", "volumes"),
    ({"gateway": {"keysSecret": "db"}}, "spec.gateway.keysSecret", "secrets"),
    ({"gateway": {"tlsSecret": "db"}}, "spec.gateway.tlsSecret", "secrets"),
    ({"gateway": {"routerTlsSecret": "db"}}, "spec.gateway.routerTlsSecret", "secrets"),
    (
        {"gateway": {"endpointPicker": True, "endpointPickerTlsSecret": "db"}},
        "spec.gateway.endpointPickerTlsSecret",
        "secrets",
    ),
    ({"template": {"imagePullSecrets": ["db"]}}, "spec.template.imagePullSecrets", "secrets"),
    (
        {"model": {"source": "org/m", "config": {"configMapKeyRef": {"name": "c"}}}},
        "spec.model.config.configMapKeyRef.name",
        "configMaps",
    ),
    (
        {"engine": {"type": "Emulated", "emulated": {"latency": "/data/secret.yaml"}}},
        "spec.engine.args: --latency",
        "args",
    ),
    # Nodes and other people's objects.
    (mounted(hostPath={"path": "/"}), "spec.template.volumes[v].hostPath", "volumes"),
    ({"model": "/models/x"}, "spec.model.cache.hostPath", "volumes"),
    (mounted(gitRepo={"repository": "x"}), "spec.template.volumes[v].gitRepo", ""),
    (
        {"template": {"priorityClassName": "system-node-critical"}},
        "spec.template.priorityClassName",
        "priorityClasses",
    ),
    ({"template": {"labels": {"app": "payments"}}}, "spec.template.labels[app]", "labels"),
    (
        {"template": {"labels": {"app.kubernetes.io/name": "payments"}}},
        "spec.template.labels[app.kubernetes.io/name]",
        "",
    ),
    (
        {"template": {"annotations": {"vault.hashicorp.com/agent-inject": "true"}}},
        "spec.template.annotations[vault.hashicorp.com/agent-inject]",
        "labels",
    ),
    ({"template": {"nodeSelector": {"a": "b"}}}, "spec.template.nodeSelector", "fields"),
    (
        {"template": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM]}}}}},
        "spec.template.affinity.nodeAffinity",
        "fields",
    ),
    (
        {
            "template": {
                "affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": TERM}]}}
            }
        },
        "spec.template.affinity.nodeAffinity",
        "fields",
    ),
    (
        {"template": {"tolerations": [{"operator": "Exists"}]}},
        "spec.template.tolerations",
        "fields",
    ),
    ({"template": {"runtimeClassName": "x"}}, "spec.template.runtimeClassName", "fields"),
    ({"template": {"schedulerName": "x"}}, "spec.template.schedulerName", "fields"),
    (
        {"template": {"resourceClaims": [{"name": "c", "resourceClaimName": "x"}]}},
        "spec.template.resourceClaims",
        "fields",
    ),
    (
        {"template": {"resources": {"limits": {"devices.kubevirt.io/kvm": 1}}}},
        "spec.template.resources.",
        "resources",
    ),
    (
        {"template": {"gpuResource": "smarter-devices/fuse"}},
        "spec.template.resources.",
        "resources",
    ),
]


@pytest.mark.parametrize(("spec", "path", "name"), WAYS, ids=lambda value: str(value)[:60])
def test_what_is_not_cleaves_own_is_refused_with_the_field_and_the_value_that_would_allow_it(
    spec: dict[str, Any], path: str, name: str
) -> None:
    deployment = build_deployment(**spec)
    faults = list(list_violations(deployment, RESTRICTED))
    (*_, fault) = [each for each in faults if each.startswith(path)]
    assert (f"policy.allow.{name} would have to list" in fault) == bool(name)
    assert not list(list_violations(deployment, OPEN))
    document = json.loads(deployment.model_dump_json(exclude_defaults=True, by_alias=True))
    document |= {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    assert fault in list_violations(deployment, RESTRICTED)
    assert not list(list_violations(deployment, OPEN))
    assert check_resource(document, None, RESTRICTED).faults


@pytest.mark.parametrize(("spec", "path", "name"), WAYS, ids=lambda value: str(value)[:60])
def test_what_a_message_names_allows_it(spec: dict[str, Any], path: str, name: str) -> None:
    deployment = build_deployment(**spec)
    lists: dict[str, tuple[str, ...]] = {}
    for _ in range(4):
        settings = OperatorSettings(account=ACCOUNT, allow_lists=lists)
        for fault in list_violations(deployment, settings):
            _, found, rest = fault.partition("policy.allow.")
            if found:
                listed, _, entry = rest.partition(" would have to list ")
                lists[listed] = (*lists.get(listed, ()), entry)
    settings = OperatorSettings(account=ACCOUNT, allow_lists=lists)
    left = list(list_violations(deployment, settings))
    assert bool(left) == (not name)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"engine": {"env": [{"name": "PYTHONPATH", "value": "/x"}]}}, "spec.engine.env"),
        ({"engine": {"args": ["--worker-cls", "x"]}}, "spec.engine.args: --worker-cls"),
        ({"nodes": 2, "parallelism": {"tensor": 2}, **set_args("--middleware=x")}, "spec.engine"),
        (
            {"nodes": 2, "parallelism": {"data": 2, "expert": True}, **set_args("--uds", "x")},
            "spec.engine.args: --uds",
        ),
        (
            {
                "members": [
                    {"role": "prefill", "args": ["--seed=1"]},
                    {"role": "decode", "args": ["--logits-processors", "os.system"]},
                ]
            },
            "spec.engine.args: --logits-processors",
        ),
        ({"template": {"labels": {"app": "x"}}}, "spec.template.labels[app]"),
        ({"model": {"source": "a/b$(TZ)", "servedName": "m"}}, ""),
    ],
)
def test_pools_that_users_make_are_judged_as_well(spec: dict[str, Any], path: str) -> None:
    if not path:
        with pytest.raises(ValueError, match="source"):
            build_pool(**spec)
        return
    faults = list(list_violations(build_pool(**spec), RESTRICTED))
    assert [each for each in faults if each.startswith(path)] == faults != []
    assert not list(list_violations(build_pool(**spec), OPEN))


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("placement", [None, {"manual": [{"role": "mixed"}]}])
def test_what_engines_of_one_role_get_is_judged_where_plans_may_have_it(
    role: str, placement: dict[str, Any] | None
) -> None:
    own = {"args": ["--worker-cls=x"], "env": [{"name": "LD_PRELOAD", "value": "x"}]}
    spec = {"engine": {"roles": {role: own}}, **({"placement": placement} if placement else {})}
    faults = [
        fault.split(" ")[0] for fault in list_violations(build_deployment(**spec), RESTRICTED)
    ]
    is_built = placement is None or role == "mixed"
    assert bool(faults) is is_built
    assert {*faults} <= {"spec.engine.args:", "spec.engine.env[LD_PRELOAD].name"}


def test_a_variable_in_a_folders_name_is_refused() -> None:
    members = [{"role": "prefill"}, {"role": "decode"}]
    pool = build_pool(model={"source": "/data/$(TZ)", "cache": CLAIM}, members=members)
    settings = OperatorSettings(allow_lists={"volumes": ("persistentVolumeClaim",)})
    (fault,) = list_violations(pool, settings)
    assert "a reference $(...) to a variable" in fault


def list_examples() -> list[Any]:
    found = []
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        try:
            found.append(load(path))
        except (ManifestError, OSError):
            continue
    return found


def test_restricted_pods_serve_what_deployments_usually_have() -> None:
    usual: list[dict[str, Any]] = [
        {},
        {"adapters": [{"name": "sql", "source": "org/sql"}], **set_args("--enable-lora")},
        {"engine": {"kvOffloadingGib": 4, "scheduling": {"order": "ShortestFirst"}}},
        {"placement": {"manual": [{"role": "mixed", "parallelism": {"data": 2, "expert": True}}]}},
        {"placement": {"manual": [{"role": "mixed", "gpu": "H100-SXM-80GB"}]}},
        {"gateway": {"endpointPicker": True, "replicas": 3, "processes": 2, "accessLog": True}},
        {"scaling": {"idleS": 600}},
        {"model": {"source": "org/m", "revision": "main", "servedName": "m", "dtype": "bfloat16"}},
        {"template": {"resources": {"limits": {"cpu": 8, "nvidia.com/gpu": 1}}}},
        set_args("--max-num-seqs", "8", "--no-enable-prefix-caching", "--block_size=32"),
        set_args("--seed", "-1", "--cudagraph-capture-sizes", "1", "2", "4", "--enforce-eager"),
        set_env("VLLM_LOGGING_LEVEL", "DEBUG"),
        set_env("HF_TOKEN", "hf_x"),
        mounted(emptyDir={}),
    ]  # fmt: skip
    for settings in (
        RESTRICTED,
        OperatorSettings(allow_lists={}, has_assigned_user=True, device="cpu"),
    ):
        for spec in usual:
            assert not list(list_violations(build_deployment(**spec), settings)), spec
    assert not list(list_violations(validate(chat()), RESTRICTED))
    examples = list_examples()
    assert len(examples) > 3
    lists = {name: ("",) if name == "folders" else ("*",) for name in NAMES}
    for example in examples:
        settings = OperatorSettings(account=ACCOUNT, allow_lists=lists)
        assert not list(list_violations(example, settings)), example.name


def test_instances_over_nodes_as_leader_worker_sets_have_nothing_else() -> None:
    pool = build_pool(nodes=2, parallelism={"tensor": 2})
    group = build_leader_worker_set(pool, "chat-mixed-x")["spec"]["leaderWorkerTemplate"]
    lists = add_own_images({}, OPEN.images)
    for part in ("leaderTemplate", "workerTemplate"):
        group[part]["spec"]["serviceAccountName"] = "chat-workers-0123abcd"
        assert not list(list_pod_faults(group[part], lists))


def test_kernels_are_not_shared_by_a_volume_unless_the_chart_allows_it() -> None:
    model = {"source": "org/m", "cache": CLAIM}
    deployment = build_deployment(model=model)
    lists: dict[str, tuple[str, ...]] = {"volumes": ("persistentVolumeClaim",)}
    for env, is_shared in (((), False), (("VLLM_CACHE_ROOT", "T*", "FLASHINFER*"), True)):
        settings = OperatorSettings(allow_lists={**lists, "env": env})
        pool = InstancePool.model_validate({
            "metadata": {"name": "p"},
            "spec": {
                "deployment": "chat", "role": "mixed", "revision": "r", "gpu": "H100",
                "model": deployment.spec.model,
            },
        })  # fmt: skip
        (pod,) = build_pods(pool, settings)
        names = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
        assert ("VLLM_CACHE_ROOT" in names) is is_shared
        assert "HF_HOME" in names
        assert not list(list_violations(pool, settings))


@pytest.mark.parametrize("kind", ["LLMDeployment", "InstancePool"])
def test_the_reconcile_creates_nothing_and_says_why(kind: str) -> None:
    spec = {"model": "facebook/opt-125m", **set_env("PYTHONPATH")}
    own: dict[str, Any] = {"deployment": "chat", "role": "mixed", "revision": "r1"}
    if kind == "LLMDeployment":
        own = {"slo": {"ttftMs": 400, "tpotMs": 40}}
    meta = {"name": "chat", "namespace": "team", "uid": "u", "generation": 1}
    stored = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": kind,
        "metadata": meta,
        "spec": {**spec, **own},
    }
    controller = Controller(RESTRICTED, OperatorMetrics())
    controller.on_change(stored)
    key = ResourceKey(kind, "team", "chat")
    cached = controller.cache.get(key)
    assert cached is not None
    (patch,) = asyncio.run(controller._decide(key, cached))
    assert isinstance(patch, PatchStatus)
    (ready,) = patch.status["conditions"]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "Invalid")
    assert "spec.engine.env[PYTHONPATH]" in ready["message"]


@pytest.mark.parametrize("case", [*REFUSED, *UNUSUAL], ids=lambda case: case.name)
def test_no_resource_that_can_be_read_makes_the_judgement_fail(case: Any) -> None:
    document = {"apiVersion": "cleave.dev/v1alpha1", **case.manifest}
    model = LLMDeployment if case.kind == "LLMDeployment" else InstancePool
    try:
        resource = model.model_validate_json(json.dumps(document))
    except ValueError:
        return
    assert all(": " in line for line in list_violations(resource, RESTRICTED))


WORDS = st.text("abc-_=$(){}/. \n\"'", max_size=12)


@given(
    args=st.lists(WORDS | st.sampled_from(["--", "-O3", "--config", "[", "$(POD_IP)"]), max_size=6)
)
def test_any_arguments_are_judged(args: list[str]) -> None:
    pool = build_pool()
    engine = pool.spec.engine.model_copy(update={"args": args})
    spec = pool.spec.model_copy(update={"engine": engine})
    list(list_violations(pool.model_copy(update={"spec": spec}), RESTRICTED))
