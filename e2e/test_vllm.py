"""The real path: vLLM on CPU, one prefill and one decode instance, KV over NIXL."""

import concurrent.futures
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from harness import Deployment, deployed, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TIMEOUT_S = 60
OUTPUT_TOKENS = 12


@dataclass(frozen=True)
class Case:
    """One request: a prompt of about so many tokens, sent one way."""

    number: int
    prompt_tokens: int
    chat: bool
    stream: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        # The tiny model's tokenizer merges common words only: a capital letter is a token.
        letters = random.Random(self.number).choices("BCDFGHJKLMNPQRSTVWXZ", k=self.prompt_tokens)
        text = f"{self.number}: {''.join(letters)}"
        prompt = (
            {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        )
        return (
            prompt
            | {
                "model": "tiny",
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})
        )


CASES = [
    Case(number, prompt_tokens, chat, stream)
    for number, (prompt_tokens, chat, stream) in enumerate(
        (prompt_tokens, chat, stream)
        for prompt_tokens in (20, 200, 1_000, 3_000, 500)
        for chat in (False, True)
        for stream in (False, True)
    )
]


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "tiny"},
        "spec": {
            # bfloat16, the engine's choice otherwise, makes ties that either side may break.
            "model": {
                "source": str(tiny_model),
                "servedName": "tiny",
                "dtype": "float32",
                "maxModelLen": 4096,
            },
            "slo": {"ttftMs": 1000, "tpotMs": 200},
        },
    }
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=420) as deployment:
        yield deployment


@dataclass(frozen=True)
class Answer:
    """What came back, and how."""

    tokens: list[int]
    prompt_tokens: int
    raw: str


def ask(url: str, case: Case) -> Answer:
    response = httpx.post(url + case.path, json=case.body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    if not case.stream:
        body = response.json()
        tokens = body["choices"][0]["token_ids"]
        return Answer(tokens, body["usage"]["prompt_tokens"], response.text)
    assert response.text.endswith("data: [DONE]\n\n")
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    tokens = [
        token
        for event in events
        for choice in event["choices"]
        for token in choice.get("token_ids") or []
    ]
    return Answer(tokens, events[-1]["usage"]["prompt_tokens"], response.text)


def metric(url: str, name: str) -> float:
    """Sum of all samples of one series."""
    lines = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def threads_cores(engine: psutil.Process) -> set[int]:
    """Every core that a thread of the engine may run on."""
    return {
        core
        for process in [engine, *engine.children(recursive=True)]
        for thread in process.threads()
        for core in os.sched_getaffinity(thread.id)
    }


def engine_url(deployment: Deployment, role: str) -> str:
    return deployment.instances()[f"tiny-{role}-0"].engine_url


def test_tokens_are_those_of_a_colocated_run_and_nothing_is_recomputed(vllm: Deployment) -> None:
    prefill, decode = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    ran = "vllm:iteration_tokens_total_sum"
    pulled = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
    ran_before, pulled_before = metric(decode, ran), metric(decode, pulled)
    split = [ask(vllm.url, case) for case in CASES]
    # A token of output is a token run: the last prompt token runs to make the first.
    assert metric(decode, ran) - ran_before == sum(len(answer.tokens) for answer in split)
    assert metric(decode, pulled) - pulled_before == sum(answer.prompt_tokens for answer in split)

    colocated = [ask(prefill, case) for case in CASES]
    for case, answer, expected in zip(CASES, split, colocated, strict=True):
        assert answer.prompt_tokens >= case.prompt_tokens
        assert len(answer.tokens) == OUTPUT_TOKENS
        assert answer.tokens == expected.tokens, case
        assert "kv_transfer_params" not in answer.raw
        assert "remote_" not in answer.raw


def test_what_the_agents_say_is_true(vllm: Deployment) -> None:
    for health in vllm.healths():
        told, load = health.registration, health.load
        assert told.engine.startswith("vllm 0.")
        assert told.kv_path.verified
        assert told.kv_path.transport.startswith("nixl")
        assert told.kv_path.bytes_per_s > 0
        assert told.kv_block_size == 128
        assert load.kv_blocks_free == told.kv_blocks_total > 0
        assert load.sampled_ns > 0


def test_each_engine_stays_on_its_own_core(vllm: Deployment) -> None:
    taken = [threads_cores(vllm.engine(f"tiny-{role}-0")) for role in ("prefill", "decode")]
    assert [len(cores) for cores in taken] == [1, 1]
    assert taken[0] != taken[1]


def test_a_client_cannot_hand_in_hand_off_data(vllm: Deployment) -> None:
    case = CASES[0]
    stolen = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    response = httpx.post(
        vllm.url + case.path, json=case.body | {"kv_transfer_params": stolen}, timeout=TIMEOUT_S
    )
    assert response.status_code == 200
    assert "kv_transfer_params" not in response.text


def test_requests_side_by_side_keep_their_own_tokens(vllm: Deployment) -> None:
    cases = CASES[:12]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm.url, case).tokens, cases))
    assert together == [ask(vllm.url, case).tokens for case in cases]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_engine_is_replaced_and_the_service_comes_back(
    vllm: Deployment, role: str
) -> None:
    instance = f"tiny-{role}-0"
    before = vllm.instances()[instance]
    victim = vllm.engine(instance)
    tree = [victim, *victim.children(recursive=True)]
    os.kill(victim.pid, signal.SIGKILL)

    # A clear answer while it is away, whichever it is: served by what is left, or an error.
    response = httpx.post(vllm.url + CASES[0].path, json=CASES[0].body, timeout=TIMEOUT_S)
    assert response.status_code == 200 or "message" in response.json()["error"]

    until(lambda: not any(p.is_running() for p in tree), 30, "the dead engine's children end")
    until(
        lambda: (
            (now := vllm.instances().get(instance))
            and now.boot_id != before.boot_id
            and now.kv_path.verified
        ),
        240,
        "the engine is back and its KV path verified",
    )
    until(
        lambda: httpx.get(f"{vllm.url}/health", timeout=TIMEOUT_S).status_code == 200, 30, "health"
    )
    colocated = ask(engine_url(vllm, "prefill"), CASES[6])
    assert ask(vllm.url, CASES[6]).tokens == colocated.tokens


def test_a_killed_agent_leaves_no_process_and_is_replaced(vllm: Deployment) -> None:
    agent = vllm.agent("tiny-decode-0")
    tree = agent.children(recursive=True)
    assert len(tree) >= 3, "warden, API server, engine core"
    os.kill(agent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    until(
        lambda: (now := vllm.instances().get("tiny-decode-0")) and now.kv_path.verified,
        240,
        "a new agent is ready",
    )
    assert len(ask(vllm.url, CASES[0]).tokens) == OUTPUT_TOKENS
