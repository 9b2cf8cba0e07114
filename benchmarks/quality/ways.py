"""The ways in which a pair answers a request: whole, split, and by what may happen to it."""

import concurrent.futures
import json
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from answers import Output, join_choices, read_output
from quality_requests import ADAPTERS, MODEL, NAMED_TOOL, Case
from transformers import AutoTokenizer

from cleave.local.tiny_model import TinyModelShape
from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, start_fast, tiny_vllm, until
from e2e.support.engine_keys import headers_for
from e2e.support.handoffs import name_source, outcomes, tiny_with_connector
from e2e.support.role_orders import Flipper
from e2e.support.vllm_prompts import engine_url, metric
from e2e.vllm_pair.adapters import write_adapter

TEXT = Path(__file__).parent / "gettysburg.txt"
HANDOFFS = "cleave_gateway_handoffs_total"
PARALLEL = 4
"""Requests at a time, so that batches differ from run to run as they do in service."""
LONG_TOKENS = 1000
_ONE_LONG = threading.Lock()
"""Held by a request with more tokens than that."""
BOUND_S = 600.0
KILL_AFTER_TOKENS = 16
FIRST, SECOND = "tiny-prefill-0", "tiny-decode-0"
PREFILL, DECODE, MIXED = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED
Each = TypeVar("Each")
Found = TypeVar("Found")
FLIPS = ((FIRST, DECODE), (SECOND, PREFILL), (FIRST, MIXED), (FIRST, PREFILL), (SECOND, DECODE))


@dataclass(frozen=True)
class Pair:
    """A served prefill and decode instance."""

    deployment: Deployment
    engines: dict[str, str]
    """Names of the model and its adapters: those by which engines know them."""

    def ask(self, url: str, case: Case, **fields: Any) -> Output:
        """The answer from the gateway or, at its URL, from an engine."""
        if url != self.deployment.url:
            fields["model"] = self.engines[case.body["model"]]
        # A gateway waits 120 s for a prompt, and one core computes 400 tokens a second.
        with _ONE_LONG if case.prompt_tokens > LONG_TOKENS else nullcontext():
            return read_output(post(url, case.path, case.body | fields)["choices"][0])

    def split(self, cases: Sequence[Case]) -> list[Output]:
        """Over the gateway. Raises RuntimeError when one was not handed over."""
        before = metric(self.deployment.url, HANDOFFS)
        found = in_parallel(lambda case: self.ask(self.deployment.url, case), cases)
        expected = sum(case.kind != NAMED_TOOL for case in cases)
        if (split := metric(self.deployment.url, HANDOFFS) - before) < expected:
            raise RuntimeError(f"{split:.0f} of {expected} requests were split")
        return found

    def whole(self, cases: Sequence[Case]) -> list[Output]:
        """By the prefill engine alone, which has in its cache what it was asked so before."""
        url = engine_url(self.deployment, "prefill")
        return in_parallel(lambda case: self.ask(url, case, cache_salt="whole"), cases)

    def pulled(self, cases: Sequence[Case]) -> list[Output]:
        """By the prefill engine, with the prompt's KV from the decode engine's cache."""
        source, owner = (engine_url(self.deployment, role) for role in ("prefill", "decode"))
        fields = {"cache_salt": "pulled"}
        in_parallel(lambda case: self.ask(owner, case, **fields, max_tokens=1), cases)
        place = {"kv_transfer_params": {"prefix_source": name_source(self.deployment)}}
        before = outcomes(source)
        found = in_parallel(lambda case: self.ask(source, case, **fields, **place), cases)
        counts = {name: count - before.get(name, 0) for name, count in outcomes(source).items()}
        print(f"prefixes of {len(cases)} prompts: {counts}", flush=True)
        return found

    def flipped(self, cases: Sequence[Case]) -> list[Output]:
        """Over the gateway, while both instances go through all roles again and again."""
        flipper, ended = Flipper(self.deployment), threading.Event()

        def flip() -> int:
            count = 0
            while not ended.wait(1.0):
                for instance, role in FLIPS:
                    flipper.flip(instance, role)
                    count += 1
                    ended.wait(1.0)
            return count

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            flips = pool.submit(flip)
            before = metric(self.deployment.url, HANDOFFS)
            try:
                url, salt = self.deployment.url, "flipped"
                found = in_parallel(lambda case: self.ask(url, case, cache_salt=salt), cases)
            finally:
                ended.set()
            split = metric(self.deployment.url, HANDOFFS) - before
            print(f"{flips.result()} flips; {split:.0f} of {len(cases)} split", flush=True)
        flipper.close()
        return found

    def resumed(self, cases: Sequence[Case]) -> list[Output]:
        """Streams whose decode engine is killed; at most so many as run at a time."""
        counts = [0] * len(cases)

        def stream(number: int) -> Output:
            case, lines = cases[number], []
            body = case.body | {"stream": True, "cache_salt": "resumed"}
            url = self.deployment.url + case.path
            with httpx.stream("POST", url, json=body, timeout=BOUND_S) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    counts[number] += line.startswith("data: {")
            if lines[-2:] != ["data: [DONE]", ""]:
                raise RuntimeError(f"a stream ended with {lines[-3:]}")
            return read_output(join_choices(lines))

        engine, how = self.deployment.engine(SECOND), "cleave_gateway_recoveries_total"
        before = metric(self.deployment.url, how)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            streams = [pool.submit(stream, number) for number in range(len(cases))]
            until(lambda: min(counts) > KILL_AFTER_TOKENS, BOUND_S, "all streams run")
            os.kill(engine.pid, signal.SIGKILL)
            found = [each.result() for each in streams]
        resumed = metric(self.deployment.url, how) - before
        print(f"{resumed:.0f} of {len(cases)} streams resumed", flush=True)
        return found

    def measure_perplexity(self, model: Path, every: int) -> dict[str, float]:
        """Of each `every`th token of the text, computed from a prompt of all before it, by way."""
        tokens = AutoTokenizer.from_pretrained(model)(TEXT.read_text()).input_ids
        engine = engine_url(self.deployment, "prefill")

        def measure(url: str, end: int) -> float:
            # Only this token may be sampled; log-probabilities are those before that.
            body = {"model": MODEL, "prompt": tokens[:end], "max_tokens": 1, "temperature": 0}
            body |= {"logprobs": 1, "allowed_token_ids": [tokens[end]]}
            body |= {"cache_salt": "whole"} if url == engine else {}
            choice = post(url, "/v1/completions", body)["choices"][0]
            found: float = choice["logprobs"]["token_logprobs"][0]
            return found

        found = {}
        for way, url in (("whole", engine), ("split", self.deployment.url)):
            sums = in_parallel(partial(measure, url), range(1, len(tokens), every))
            found[way] = math.exp(-math.fsum(sums) / len(sums))
        return found


def in_parallel(ask: Callable[[Each], Found], cases: Sequence[Each]) -> list[Found]:
    """What is found for each, a few at a time and in a random order."""
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        found = dict(zip(order, pool.map(lambda n: ask(cases[n]), order), strict=True))
    return [found[n] for n in range(len(cases))]


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer. Raises RuntimeError for another status than 200."""
    answer = httpx.post(url + path, json=body, headers=headers_for(url), timeout=BOUND_S)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{path}: status {answer.status_code}: {answer.text[:500]}")
    found: dict[str, Any] = answer.json()
    return found


def wait_for(deployment: Deployment, names: set[str]) -> Pair:
    """The pair, when gateway and engines have models and adapters of these names."""
    engines: dict[str, str] = {}

    def has_all() -> bool:
        named = read_models(engine_url(deployment, "decode"))
        engines.update({name.partition("@")[0]: name for name in named})
        return {*read_models(deployment.url)} >= names <= engines.keys()

    until(has_all, BOUND_S, "the adapters are loaded")
    return Pair(deployment, engines)


def read_models(url: str) -> list[str]:
    """The names of models that a gateway or an engine lists."""
    answer = httpx.get(f"{url}/v1/models", headers=headers_for(url), timeout=BOUND_S)
    return [each["id"] for each in answer.json()["data"]]


def build_manifest(
    model: Path, connector: str, dtype: str, has_adapters: bool, folder: Path
) -> dict[str, Any]:
    """A prefill and a decode instance; their adapters are written to `folder`."""
    name, _, way = connector.partition("/")
    # Calls of a tool that a request names are asked for by their schema.
    args = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args += ["--enable-lora", "--max-loras", str(len(ADAPTERS))] if has_adapters else []
    manifest: dict[str, Any] = (
        tiny_with_connector(model, way, checksums=True)
        if way
        else tiny_vllm(model, engine=start_fast(connector=name))
    )
    spec = manifest["spec"]
    spec["engine"]["args"] += args
    spec["model"] |= {"dtype": dtype, "maxModelLen": 8192}
    spec["pools"] = {"flipping": "Off"}
    if not has_adapters:
        return manifest
    config = json.loads((model / "config.json").read_text())
    shape = TinyModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
    )
    spec["adapters"] = [
        {"name": each, "source": str(write_adapter(folder / each, seed, shape, spread=0.02))}
        for seed, each in enumerate(ADAPTERS)
    ]
    return manifest
