"""vLLM on CPU while the folder of its model changes under load, and its engines start one by one.

Two checkpoints of one shape, as of a fine-tune: they differ in nothing but the weights themselves.
"""

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm, until
from e2e.support.engine_keys import headers_for
from e2e.support.handoffs import PREFILL_ORDER, lost, name_source, outcomes, post, prefill
from e2e.support.vllm_prompts import TIMEOUT_S, Case, ask, engine_url, make_case, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

BACK_S = 600
CASES = [Case(number, 150 + 200 * number, chat=False, stream=False) for number in range(5)]
USED = 'cleave_gateway_handoffs_total{result="used"}'


def fine_tune(source: Path, folder: Path) -> None:
    """A copy of a model in which the attention of one layer is other: of equal shape and size."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(7)
    for kind in ("k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{kind}.weight"
        change = rng.standard_normal(weights[name].shape, dtype=np.float32)
        weights[name] = weights[name] + np.float32(0.5 / weights[name].shape[1] ** 0.5) * change
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def checkpoints(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The folder that engines load, a link to the first of two checkpoints; and the second one."""
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "current"
    shutil.copytree(tiny_model, first)
    fine_tune(tiny_model, second)
    link.symlink_to(first)
    return link, second


def turn(link: Path, folder: Path) -> None:
    """Let the folder that engines load be another one at once."""
    new = link.with_name("new")
    new.symlink_to(folder)
    new.replace(link)


@contextmanager
def loaded(url: str) -> Iterator[list[tuple[Case, list[int]]]]:
    """A client that asks all the time, and what it got; it fails with its first failed request."""
    got: list[tuple[Case, list[int]]] = []
    ended, faults = threading.Event(), list[BaseException]()

    def run() -> None:
        number = 0
        try:
            while not ended.wait(0.2):
                case = CASES[number % len(CASES)]
                got.append((case, ask(url, case).tokens))
                number += 1
        except BaseException as fault:  # noqa: BLE001 - raised in the test
            faults.append(fault)

    client = threading.Thread(target=run)
    client.start()
    try:
        yield got
    finally:
        ended.set()
        client.join()
    if faults:
        raise faults[0]


def restart(vllm: Deployment, role: str) -> None:
    """The engine of a role ends, and starts with what is in the folder."""
    instance = f"tiny-{role}-0"
    boot_id = vllm.instances()[instance].boot_id
    vllm.engine(instance).kill()

    def is_back() -> bool:
        found = vllm.instances().get(instance)
        is_ready = found is not None and found.state == agent_pb2.STATE_READY
        return is_ready and found.boot_id != boot_id

    until(is_back, BACK_S, f"{instance} is back")


def compute(url: str) -> dict[Case, list[int]]:
    """What one engine alone answers."""
    return {case: ask(url, case).tokens for case in CASES}


def refuse_by_cleave(vllm: Deployment) -> None:
    """Engines whose weights differ get each other's handoff and prefix: neither is used."""
    first, second = (engine_url(vllm, role) for role in ("prefill", "decode"))
    case, before = make_case(700), lost(second)
    request_id = uuid.uuid4().hex
    handed = prefill(first, case, request_id)
    answer = post(second, case, request_id, kv_transfer_params=handed)
    assert answer["choices"][0]["token_ids"] == ask(second, case).tokens
    assert {name: n - before.get(name, 0) for name, n in lost(second).items()} == {"layout": 1}
    case = make_case(900)
    ask(second, case)
    pulled = outcomes(first)
    params = {**PREFILL_ORDER, "prefix_source": name_source(vllm)}
    post(first, case, uuid.uuid4().hex, max_tokens=1, kv_transfer_params=params)
    found = {name: n - pulled.get(name, 0) for name, n in outcomes(first).items()}
    assert {name for name, n in found.items() if n} == {"layout"}
    assert ask(first, case).tokens != ask(second, case).tokens


def refuse_by_nixl(vllm: Deployment) -> None:
    """vLLM's own handshake refuses the engine, as the folder's name has what was loaded."""
    first, second = (engine_url(vllm, role) for role in ("prefill", "decode"))
    case, request_id = make_case(700), uuid.uuid4().hex
    handed = prefill(first, case, request_id)
    body = {**case.body, "kv_transfer_params": handed}
    headers = {"X-Request-Id": request_id, **headers_for(second)}
    answer = httpx.post(second + case.path, json=body, timeout=TIMEOUT_S, headers=headers)
    if answer.status_code == 200:
        tokens = answer.json()["choices"][0]["token_ids"]
        assert tokens == ask(second, case).tokens
    assert metric(second, "vllm:nixl_bytes_transferred_sum") == 0


@pytest.mark.parametrize(
    ("connector", "refuse"), [("Cleave", refuse_by_cleave), ("Nixl", refuse_by_nixl)]
)
def test_a_folder_that_changes_under_load_never_mixes_weights(
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    connector: str,
    refuse: Callable[[Deployment], None],
) -> None:
    link, second = checkpoints
    manifest = tiny_vllm(link, engine=start_fast(connector=connector), pools={"flipping": "Off"})
    with deployed(manifest, tmp_path, timeout_s=900) as vllm:
        (before,) = {each.weights for each in vllm.instances().values()}
        old = compute(engine_url(vllm, "prefill"))
        used = metric(vllm.url, USED)
        assert compute(vllm.url) == old
        assert metric(vllm.url, USED) > used
        with loaded(vllm.url) as got:
            turn(link, second)
            restart(vllm, "decode")
            found = {name: each.weights for name, each in vllm.instances().items()}
            assert found["tiny-prefill-0"] == before != found["tiny-decode-0"]
            assert "have loaded other weights" in vllm.cleave("status", timeout_s=120).stdout
            new = compute(engine_url(vllm, "decode"))
            assert all(new[case] != old[case] for case in CASES)
            used = metric(vllm.url, USED)
            count = len(got)
            until(lambda: len(got) >= count + 2 * len(CASES), BACK_S, "answers of one engine")
            assert metric(vllm.url, USED) == used
            refuse(vllm)
            restart(vllm, "prefill")
            until(
                lambda: all(r.kv_path.verified for r in vllm.instances().values()),
                BACK_S,
                "the new weights are a pair",
            )
            until(lambda: metric(vllm.url, USED) > used, BACK_S, "the pair is used")
        assert compute(vllm.url) == new == compute(engine_url(vllm, "prefill"))
        wrong = [case for case, tokens in got if tokens not in (old[case], new[case])]
        assert not wrong
        assert {each.weights for each in vllm.instances().values()} == {found["tiny-decode-0"]}
