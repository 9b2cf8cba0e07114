"""A model's folder or branch changes below a fleet on one machine; its engines start one by one.

Every answer is of one of both weights, no request fails, and no KV goes from one to the other.
"""

import concurrent.futures
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cleave.rpc.v1 import agent_pb2

from e2e.chaos.expected_output import COMPLETIONS, expect
from e2e.support.deployments import Deployment, deployed, emulated, until

pytestmark = pytest.mark.timeout(600)

CLIENTS = 6
BACK_S = 150
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "vocab_size": 50272,
    "max_position_embeddings": 8192,
}


def write_model(folder: Path, weights: str) -> None:
    """A model that is replaced as a whole, as a copy job or a turned link does."""
    folder.mkdir(exist_ok=True)
    for name, text in (("config.json", json.dumps(CONFIG)), ("model.safetensors", weights)):
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / name)


def write_branch(cache: Path, commit: str) -> None:
    """What a branch was when it was downloaded last, in a cache of Hugging Face."""
    reference = cache / "models--facebook--opt-13b" / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_model(folder, "first")
    return folder


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Deployment]:
    """Two prefill and two decode instances with a folder."""
    manifest = emulated("fleet", 2, 2)
    manifest["spec"]["model"]["source"] = str(model)
    manifest["spec"]["engine"]["emulated"] = {"timeScale": 0.02}
    with deployed(manifest, tmp_path, 180) as deployment:
        yield deployment


@pytest.fixture
def pair_of_branch(tmp_path: Path) -> Iterator[Deployment]:
    """A prefill and a decode instance with the main branch of a repository, which is in a cache."""
    write_branch(tmp_path / "hub", "a" * 40)
    manifest = emulated("fleet", 1, 1, time_scale=0.02)
    manifest["spec"]["engine"]["env"] = [{"name": "HF_HUB_CACHE", "value": str(tmp_path / "hub")}]
    with deployed(manifest, tmp_path, 180) as deployment:
        yield deployment


@dataclass
class Load:
    """Clients that ask all the time, and what they got."""

    fleet: Deployment
    weights: set[str]
    """Of which answers may be."""
    served: Counter[str] = field(default_factory=Counter)
    """Answers, by their weights."""
    faults: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=120) as client:
            while not self.ended.is_set():
                # Prompts have beginnings in common, which engines have cached and pull.
                prompt = [7, *[rng.randrange(4)] * 400, *rng.choices(range(1000), k=100)]
                body = {"model": "fleet", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
                response = client.post(f"{self.fleet.url}{COMPLETIONS}", json=body)
                self.check(body, response)

    def check(self, body: dict, response: httpx.Response) -> None:
        if response.status_code != 200:
            self.faults.append(f"{response.status_code}: {response.text}")
            return
        text = response.json()["choices"][0]["text"]
        right = [w for w in self.weights if expect(COMPLETIONS, body, "fleet", w).texts == (text,)]
        if right:
            self.served[right[0]] += 1
        else:
            self.faults.append(f"wrong tokens: {dict(response.headers)}")

    def wait_for(self, weights: str) -> None:
        """Until some more answers are of these weights."""
        least = self.served[weights] + 20
        until(lambda: self.served[weights] >= least, BACK_S, f"answers of {weights}")


def find_weights(fleet: Deployment) -> set[str]:
    return {each.weights for each in fleet.instances().values()}


def restart(fleet: Deployment, instance: str) -> None:
    """Its engine is lost, and starts again with what is in the folder."""
    boot_id = fleet.instances()[instance].boot_id
    os.kill(fleet.engine(instance).pid, signal.SIGKILL)

    def is_back() -> bool:
        found = fleet.instances()[instance]
        return found.boot_id != boot_id and found.state == agent_pb2.STATE_READY

    until(is_back, BACK_S, f"{instance} is back")


def count_refused(fleet: Deployment) -> float:
    """Pulls of KV that engines have refused because it is of something else."""
    total = 0.0
    for each in fleet.instances().values():
        page = httpx.get(f"{each.engine_url}/metrics", timeout=20).text
        (line,) = re.findall(r"(?m)^[^#]*emulated_foreign_pulls.*$", page)
        total += float(line.rpartition(" ")[2])
    return total


def test_a_changed_folder_reaches_engines_one_by_one_and_nothing_is_mixed(
    fleet: Deployment, model: Path
) -> None:
    (before,) = find_weights(fleet)
    load = Load(fleet, {before})
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.ask, seed) for seed in range(CLIENTS)]
        try:
            load.wait_for(before)
            write_model(model, "second")
            restart(fleet, "fleet-prefill-0")
            (after,) = find_weights(fleet) - {before}
            load.weights.add(after)
            said = fleet.cleave("status").stdout
            assert "3 of 4 instances have loaded other weights than " + after in said
            assert "exchange no KV with the others" in said
            load.wait_for(before)
            restart(fleet, "fleet-decode-0")
            # Both weights have a pair now.
            load.wait_for(before)
            load.wait_for(after)
            restart(fleet, "fleet-decode-1")
            restart(fleet, "fleet-prefill-1")
            assert find_weights(fleet) == {after}
            load.wait_for(after)
        finally:
            load.ended.set()
        for client in clients:
            client.result()
    assert load.faults == []
    assert count_refused(fleet) == 0
    assert "weights" not in fleet.cleave("status").stdout
    # All pairs were tested again, and the first handoffs are of the new weights.
    until(lambda: all(r.kv_path.verified for r in fleet.instances().values()), BACK_S, "verified")


def test_a_branch_that_moves_and_goes_back_changes_the_weights_twice(
    pair_of_branch: Deployment, tmp_path: Path
) -> None:
    fleet = pair_of_branch
    (before,) = find_weights(fleet)
    found = []
    for commit in ("b" * 40, "a" * 40):
        write_branch(tmp_path / "hub", commit)
        for instance in sorted(fleet.instances()):
            restart(fleet, instance)
        (weights,) = find_weights(fleet)
        found.append(weights)
        body = {"model": "fleet", "prompt": "a question " * 40, "max_tokens": 12}
        deadline = time.monotonic() + BACK_S
        while True:
            answer = httpx.post(f"{fleet.url}{COMPLETIONS}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
            assert (text,) == expect(COMPLETIONS, body, "fleet", weights).texts
            if answer.headers.get("x-cleave-prefill"):
                break
            assert time.monotonic() < deadline, "no handoff"
            time.sleep(0.2)
    assert found[0] != found[1] == before
