"""Counts which public deployments of prefill and decode engines can be written as an LLMDeployment.

The recipes are those of InferenceX for vLLM; each is converted and checked as admission does.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cleave.api.manifest import ManifestError, validate
from cleave.controller.webhook.validation import check_deployment

RECIPES = "benchmarks/multi_node/srt-slurm-recipes/vllm"
ROLES = ("prefill", "decode")
_SPECULATION = "speculative-config"
_OWN = frozenset((
    "data-parallel-size", "enable-expert-parallel", "headless", "host", "kv-transfer-config",
    "master-addr", "master-port", "max-model-len", "max-num-batched-tokens", "max-num-seqs",
    "nnodes", "node-rank", "pipeline-parallel-size", "port", "served-model-name",
    "tensor-parallel-size",
))  # fmt: skip
"""Flags that fields of the resource stand for, or that Cleave sets itself."""
_OWN_ENV = frozenset(("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"))
_FRONTEND = "dyn-"
"""Flags of Dynamo's workers, which engines do not have."""
_STORE = "MooncakeStoreConnector"


def convert(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recipe as a manifest; None: its engines have one role."""
    backend, resources = recipe["backend"], recipe["resources"]
    configs = {role: dict(backend["vllm_config"].get(role) or {}) for role in ROLES}
    if not all(configs.values()):
        return None
    first, second = configs.values()
    shared = {name: value for name, value in first.items() if second.get(name) == value}
    if _SPECULATION in second:
        shared[_SPECULATION] = second[_SPECULATION]
    roles, pools = {}, []
    for role, config in configs.items():
        own = {name: each for name, each in config.items() if shared.get(name) != each}
        env = (backend.get(f"{role}_environment") or {}).items()
        variables = [{"name": name, "value": str(value)} for name, value in env]
        roles[role] = {
            "args": build_args(own),
            "env": [each for each in variables if each["name"] not in _OWN_ENV],
        }
        pools.append(build_pool(role, config, resources.get(f"{role}_workers") or 1))
    engine = {"connector": "Nixl", "image": recipe["model"]["container"]}
    engine |= {"args": build_args(shared), "roles": roles}
    lengths = [config[name] for config in configs.values() if (name := "max-model-len") in config]
    model = {"source": "org/model"} | ({"maxModelLen": max(lengths)} if lengths else {})
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "recipe"},
        "spec": {
            "model": model,
            "slo": {"ttftMs": 2000, "tpotMs": 50},
            "engine": engine,
            "placement": {"manual": pools},
        },
    }


def build_pool(role: str, config: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The instances of one role."""
    data = config.get("data-parallel-size", 1)
    size = {
        "tensor": config.get("tensor-parallel-size", 1),
        "pipeline": config.get("pipeline-parallel-size", 1),
        **({"data": data} if data > 1 else {}),
    }
    if config.get("enable-expert-parallel") and size["tensor"] * data > 1:
        size["expert"] = True
    limits = {"maxNumSeqs": "max-num-seqs", "maxNumBatchedTokens": "max-num-batched-tokens"}
    given = {field: config[flag] for field, flag in limits.items() if flag in config}
    return {"role": role, "replicas": replicas, "parallelism": size, **given}


def build_args(config: Mapping[str, Any]) -> list[str]:
    """Arguments of the engine, but those that Cleave sets."""
    args: list[str] = []
    for name, value in config.items():
        if name in _OWN or name.startswith((_FRONTEND, "data-parallel-")) or value is None:
            continue
        if isinstance(value, bool):
            args.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            texts = (json.dumps(each) if isinstance(each, dict) else str(each) for each in values)
            args += [f"--{name}", *texts]
    return args


def list_faults(manifest: dict[str, Any]) -> list[str]:
    """Why admission refuses it; empty: it does not."""
    try:
        return list(check_deployment(validate(manifest), None).faults)
    except ManifestError as error:
        return list(error.faults)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of github.com/SemiAnalysisAI/InferenceX")
    folder = parser.parse_args().checkout / RECIPES
    counts, reasons = Counter[str](), Counter[str]()
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text()
        manifest = convert(yaml.safe_load(text))
        if manifest is None:
            continue
        faults = list_faults(manifest)
        counts["recipes with prefill and decode engines"] += 1
        counts["admitted"] += not faults
        counts["admitted, but for a store of KV (Mooncake)"] += not faults and _STORE in text
        reasons.update(faults)
    for what, number in (*counts.items(), *reasons.most_common()):
        print(f"{number:5} {what}")


if __name__ == "__main__":
    main()
