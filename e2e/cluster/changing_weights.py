"""Weights of a deployment on a cluster, of each kind, and what is true while they change."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.chaos.expected_output import CHAT, expect
from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.volumes import IMAGE_REGISTRY
from e2e.test_cluster_operator import READY_S, Chat, condition, deployed, message, read_log

USERS = 3
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "vocab_size": 50272,
    "max_position_embeddings": 8192,
}
REPOSITORY = "cleave-tests/model"


def write_model(folder: Path, weights: str) -> None:
    """Files of a model that any pod may read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("config.json", json.dumps(CONFIG)), ("model.safetensors", weights)):
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / name)


def write_branch(home: Path, commit: str) -> None:
    """What a branch was when it was downloaded last, in a cache of Hugging Face."""
    reference = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


def open_folders(folder: Path) -> None:
    """Let pods read what is below, as another user."""
    for path in (folder, *folder.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)


def build_manifest(model: dict[str, Any]) -> str:
    spec = {
        "model": {"servedName": "chat", "maxModelLen": 8192, **model},
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"type": "Emulated", "emulated": {"timeScale": 0.05}},
        "placement": {
            "manual": [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 2}]
        },
    }
    head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    return json.dumps({**head, "metadata": {"name": "chat"}, "spec": spec})


@dataclass(frozen=True)
class Kind:
    """A source of weights, and how it comes to have others."""

    model: dict[str, Any]
    change: Callable[[Chat], None]


def edit_model(chat: Chat, model: dict[str, Any]) -> None:
    chat.edit({"model": model})


def restart_one(chat: Chat) -> None:
    """A pod is deleted: its successor reads what is there now."""
    name = chat.workers("decode")[0]["metadata"]["name"]
    chat.cluster.kubectl("delete", "pod", name, "-n", chat.namespace, "--wait=false")


def make_image(_: Cluster, __: str, folder: Path) -> Kind:
    """Two images, each with the files of a model in its root folder."""
    images = [folder / f"weights:{tag}" for tag in (1, 2)]
    for image in images:
        write_model(image, image.name)
    first, second = (
        {"source": "/opt/model", "cache": {"image": {"reference": f"{IMAGE_REGISTRY}{image}"}}}
        for image in images
    )
    return Kind(first, lambda chat: edit_model(chat, second))


def make_moved_tag(_: Cluster, __: str, folder: Path) -> Kind:
    """One image whose tag is given to other files."""
    image = folder / "weights:latest"
    write_model(image, "first")
    model = {"source": "/opt/model", "cache": {"image": {"reference": f"{IMAGE_REGISTRY}{image}"}}}

    def change(chat: Chat) -> None:
        write_model(image, "second")
        restart_one(chat)

    return Kind(model, change)


def make_claim(cluster: Cluster, namespace: str, folder: Path) -> Kind:
    """Two claims, each of a volume with the files."""
    models = []
    for name in ("weights-a", "weights-b"):
        write_model(folder / name, name)
        _create_claim(cluster, namespace, name, folder / name)
        claim = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
        models.append({"source": "/opt/model", "cache": claim})
    return Kind(models[0], lambda chat: edit_model(chat, models[1]))


def _create_claim(cluster: Cluster, namespace: str, name: str, folder: Path) -> None:
    size, modes = {"storage": "1Gi"}, ["ReadOnlyMany"]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": size,
            "accessModes": modes,
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "none",
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": namespace, "name": name},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": modes,
            "resources": {"requests": size},
            "storageClassName": "none",
            "volumeName": f"{namespace}-{name}",
        },
    }
    cluster.apply(volume)
    cluster.apply(claim, namespace=namespace)


def make_folder(_: Cluster, __: str, folder: Path) -> Kind:
    """A folder on each node, which is written again."""
    model = folder / "m"
    write_model(model, "first")

    def change(chat: Chat) -> None:
        write_model(model, "second")
        restart_one(chat)

    return Kind({"source": str(model)}, change)


def make_branch(_: Cluster, __: str, folder: Path) -> Kind:
    """A branch of a repository, which moves."""
    home = folder / "hf"
    write_branch(home, "a" * 40)

    def change(chat: Chat) -> None:
        write_branch(home, "b" * 40)
        restart_one(chat)

    return Kind({"source": REPOSITORY, "cache": {"hostPath": {"path": str(home)}}}, change)


@contextmanager
def under_load(chat: Chat) -> Iterator[tuple[Counter[str], list[str]]]:
    """Users that ask all the time: (answers by text, what went wrong)."""
    texts: Counter[str] = Counter()
    faults: list[str] = []
    ended = threading.Event()

    def use() -> None:
        while not ended.wait(0.1):
            began = time.time()
            try:
                texts[ask(chat.address)] += 1
            except (OSError, http.client.HTTPException, AssertionError) as fault:
                faults.append(f"at {began:.1f}: {fault!r}")

    users = [threading.Thread(target=use) for _ in range(USERS)]
    for user in users:
        user.start()
    try:
        yield texts, faults
    finally:
        ended.set()
        for user in users:
            user.join()


BODY = {
    "model": "chat",
    "messages": [{"role": "user", "content": "What is a river? " * 30}],
    "max_tokens": 16,
    "ignore_eos": True,
}


def ask(address: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, json.dumps(BODY), headers)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body[:300]
        text: str = json.loads(body)["choices"][0]["message"]["content"]
        return text
    finally:
        connection.close()


def find_weights(chat: Chat) -> set[str]:
    return {pod["metadata"]["labels"].get("cleave.dev/weights", "") for pod in chat.workers()}


def expect_text(weights: str) -> str:
    return expect(CHAT, BODY, "chat", weights).texts[0]


def find_reason(chat: Chat) -> str:
    found = chat.deployment.get("status", {}).get("conditions", [])
    return next((each["reason"] for each in found if each["type"] == "WeightsAgree"), "")


def roll_out(cluster: Cluster, namespace: str, folder: Path, kind: Kind) -> set[str]:
    """Change the weights under load: no request fails, every answer is of one of both weights, and
    in the end all instances have the new ones. Returns the reasons of WeightsAgree on the way."""
    open_folders(folder)
    reasons: set[str] = set()
    with deployed(cluster, namespace, build_manifest(kind.model)) as chat:
        try:
            wait_until(lambda: condition(chat.deployment, "WeightsAgree") == "True", 120, "known")
            (before,) = find_weights(chat)
            old = {pod["metadata"]["uid"] for pod in chat.workers()}
            with under_load(chat) as (texts, faults):
                wait_until(lambda: texts[expect_text(before)] > 10, 120, "the load is on")
                kind.change(chat)

                def is_rolled_out() -> bool:
                    agrees = find_reason(chat)
                    reasons.add(agrees)
                    found = find_weights(chat)
                    is_new = len(found) == 1 and not found & {before, ""}
                    return is_new and agrees == "Same" and chat.is_ready()

                wait_until(is_rolled_out, READY_S, "all have the new weights")
                (after,) = find_weights(chat)
                count = texts[expect_text(after)]
                wait_until(lambda: texts[expect_text(after)] > count + 10, 120, "they answer")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(cluster, namespace)}") from error
        assert faults == []
        assert set(texts) == {expect_text(before), expect_text(after)}
        assert not old & {pod["metadata"]["uid"] for pod in chat.workers()}
        assert message(chat.deployment, "WeightsAgree") == (
            f"3 instances have loaded weights {after}"
        )
    return reasons
