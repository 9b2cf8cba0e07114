"""The rules as CEL, which the API server evaluates, against the same rules in Python."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from cel_expr_python import cel
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.manifest import validate
from cleave.api.pool import InstancePool
from cleave.controller.author_policy.admission_rules import build_rules
from cleave.controller.author_policy.allow_lists import NAMES, add_own_images
from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.controller.author_policy.violations import build_pods, list_pod_faults
from cleave.controller.settings import OperatorSettings

from tests.support.fake_cluster import chat
from tests.support.pod_schema import add_field, list_fields

FILE = Path(__file__).parents[3] / "charts" / "cleave" / "files" / "pod-rules.yaml"
ACCOUNT = "system:serviceaccount:cleave-system:cleave-operator"
SETTINGS = OperatorSettings(account=ACCOUNT)


def build_bases() -> list[dict[str, Any]]:
    full = chat(
        engine={"type": "vLLM", "env": [{"name": "HF_TOKEN", "value": "x"}]},
        gateway={"keysSecret": "keys", "tlsSecret": "tls"},
        model={"source": "org/m", "cache": {"persistentVolumeClaim": {"claimName": "c"}}},
    )
    spec = {"deployment": "chat", "role": "mixed", "revision": "r", "model": "/models/m"}
    pools = [
        {"nodes": 2, "parallelism": {"data": 2, "expert": True}},
        {"members": [{"role": "prefill"}, {"role": "decode"}]},
    ]
    resources = [validate(chat()), validate(full)] + [
        InstancePool.model_validate_json(
            json.dumps({"metadata": {"name": "p"}, "spec": {**spec, **pool}})
        )
        for pool in pools
    ]
    return [pod for resource in resources for pod in build_pods(resource, SETTINGS)]


ENVIRONMENT = cel.NewEnv(variables={"variables": cel.Type.DYN})
PROGRAMS = [ENVIRONMENT.compile(each["expression"]) for each in build_rules()["validations"]]
BASES = build_bases()
FIELDS = list(list_fields())
WORDS = [
    "x", "/x", "/data", "/data/a", "/data/../x", "/datax", "/", "", "a/b", "*", "cleave", "worker",
    "HF_HOME", "HF_TOKEN_PATH", "PYTHONPATH", "NCCL_DEBUG", "VLLM_PLUGINS", "tmp", "model", "keys",
    "/tmp", "cleave.dev/agents", "cleave.dev/x", "kube-root-ca.crt", "default-scheduler",
    "nvidia.com/gpu", "nvidia.com/mig-1g", "cleave-gateway:1", "cleave-gateway@sha256:1", "$(TZ)",
    "$(POD_IP)", "$$(TZ)", "$$$(TZ)", "RuntimeDefault", "node.kubernetes.io/not-ready",
    "hostNetwork", "persistentVolumeClaim", "python", "-m", "cleave.gateway.main",
]  # fmt: skip
ENTRIES = {
    "folders": ["/x", "/data/a", ""],
    "volumes": ["*", "hostPath", "persist*", "nfs", "image", "csi"],
    "fields": ["*", "hostNetwork", "tolerations", "nodeSelector", "schedulerName"],
}


def allows_by_cel(pod: dict[str, Any], lists: AllowLists) -> bool:
    variables: dict[str, Any] = {"templates": [pod]}
    for name in NAMES:
        entries = lists.get(name, ())
        variables[name] = [each for each in entries if not each.endswith("*")]
        variables[f"{name}Prefixes"] = [each[:-1] for each in entries if each.endswith("*")]
    # An error of an expression counts as false: failurePolicy is Fail.
    return all(program.eval(data={"variables": variables}).value() is True for program in PROGRAMS)


def allows(pod: dict[str, Any], lists: AllowLists) -> bool:
    # CEL looks at no flags of engines, which any list of them allows.
    return not list(list_pod_faults(pod, {**lists, "args": ("*",)}))


def test_the_chart_has_the_rules_of_this_table() -> None:
    assert yaml.safe_load(FILE.read_text()) == build_rules()


def test_cleaves_own_pods_pass_both() -> None:
    volumes = ("persistentVolumeClaim", "hostPath")
    own = {"secrets": ("keys", "tls"), "volumes": volumes, "folders": ("/models",)}
    lists = add_own_images(own, SETTINGS.images)
    assert len(BASES) == 7
    for pod in BASES:
        assert allows(pod, lists)
        assert allows_by_cel(pod, lists)


def test_python_and_cel_agree_on_each_field_of_a_pod() -> None:
    """2 x 1,141 variants."""
    own = add_own_images({}, SETTINGS.images)
    for lists in (own, {**dict.fromkeys(NAMES, ("*",)), "folders": ("/x",)}):
        for path, value in FIELDS:
            pod = {**BASES[1], "spec": add_field(BASES[1]["spec"], path[0], value)}
            assert allows(pod, lists) == allows_by_cel(pod, lists), path


@st.composite
def draw_pods(draw: st.DrawFn) -> dict[str, Any]:
    pod = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(0, 3))):
        path, value = draw(st.sampled_from(FIELDS))
        pod["spec"] = add_field(pod["spec"], path[0], value)
    for _ in range(draw(st.integers(0, 3))):
        _replace_word(pod, draw)
    for name in ("labels", "annotations"):
        keys = draw(st.lists(st.sampled_from([*WORDS, *pod["metadata"]["labels"]]), max_size=2))
        meta = pod["metadata"]
        meta[name] = {**meta.get(name, {}), **{key: draw(st.sampled_from(WORDS)) for key in keys}}
    return pod


def _replace_word(pod: dict[str, Any], draw: st.DrawFn) -> None:
    """Replace some text of the pod, at any depth, or remove a field."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(each, dict | list):
                collect(each)

    collect(pod["spec"])
    holder, key = draw(st.sampled_from(places))
    if isinstance(holder[key], str):
        holder[key] = draw(st.sampled_from(WORDS))
    elif isinstance(holder, dict) and key not in ("containers", "name"):
        del holder[key]


LISTS = st.fixed_dictionaries({
    name: st.lists(
        st.sampled_from(ENTRIES.get(name, [*WORDS, "a*", "H*", "nvidia.com/*", "/d*", "c*"])),
        max_size=3,
    ).map(tuple)
    for name in NAMES
})  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(pod=draw_pods(), lists=LISTS, has_own=st.booleans())
def test_python_and_cel_agree_on_any_pod(
    pod: dict[str, Any], lists: AllowLists, has_own: bool
) -> None:
    lists = add_own_images(lists, SETTINGS.images) if has_own else lists
    assert allows(pod, lists) == allows_by_cel(pod, lists)
