"""vLLM engines under agents, one GPU for all: start, loads, profile, pairs, kills; the simulator.

Part of one_gpu.py. Agents listen on 127.0.0.2 and 127.0.0.3, each with a share of the GPU. With a
folder that has no weights (`--dummy`) vLLM fills them at random, equally in both engines. On a CPU
the same runs with the tiny model.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import yaml
from copies import Row

from cleave.perf import named_profiles
from cleave.perf.profile.profile import read_profile
from cleave.profiling.client import OpenAIClient
from cleave.profiling.measurements import draw_prompt
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave.simulator import run
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "fidelity")]
import subprocesses
from arrivals import draw_trace, read_lengths
from load import as_sent, offer
from recordings import keep, recall

CLEAVE = Path(sys.executable).with_name("cleave")
HOSTS = {"prefill": "127.0.0.2", "decode": "127.0.0.3"}
AGENT_PORT, GATEWAY_PORT = 19_300, 19_400
MODEL = "bench"
OUTPUT_TOKENS = 16
REQUEST_S = 300.0
PROFILE_S = 540.0
MAX_REQUEST_TOKENS = 8_000
"""Prompt and output of the longest request of a load."""
PROFILE = "profile.yaml"
LIMITS = "limits.json"
NO_JIT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engines, and of the requests that are sent one by one; kept for the simulator."""

    prompts: tuple[int, ...]
    """Lengths in tokens."""
    max_num_seqs: int
    max_batched_tokens: int
    block_tokens: int

    @property
    def engine_args(self) -> list[str]:
        """For vLLM."""
        args = ["--max-num-seqs", self.max_num_seqs, "--block-size", self.block_tokens]
        return [*map(str, args), "--max-num-batched-tokens", str(self.max_batched_tokens)]


ON_GPU = Limits((512, 2_048, 8_192), 256, 8_192, 16)
ON_CPU = Limits((200, 1_000), 64, 2_048, 128)


@dataclass(frozen=True, slots=True)
class Setup:
    """What runs: `args` are the engine's, beside its limits."""

    model: Path
    args: tuple[str, ...]
    folder: Path
    limits: Limits
    num_requests: int
    start_s: float
    profile_args: tuple[str, ...] = ("--quick",)
    data: Path | None = None
    """Folder with Azure's conversations, whose lengths the loads have; None: no loads."""
    rates: tuple[float, ...] = ()
    """Requests a second of each load."""
    load_s: float = 30.0


class EnginePair:
    """Agents with an engine each, and a gateway."""

    def __init__(self, setup: Setup, connector: str, roles: Sequence[str]) -> None:
        self._setup = setup
        self._connector = connector
        self._roles = roles
        self._stack = ExitStack()
        self.gateway = f"http://127.0.0.1:{GATEWAY_PORT}"

    def __enter__(self) -> "EnginePair":
        setup, env = self._setup, {**NO_JIT, **os.environ}
        agents = setup.folder / "agents"
        addresses = {role: f"{HOSTS[role]}:{AGENT_PORT}" for role in self._roles}
        agents.write_text("\n".join(addresses.values()))
        for role in self._roles:
            argv = [sys.executable, "-m", "cleave_worker.agent.main", "--name", f"{MODEL}-{role}"]
            argv += ["--deployment", MODEL, "--role", role if len(self._roles) > 1 else "mixed"]
            argv += ["--model", str(setup.model), "--served-model-name", MODEL]
            argv += ["--host", HOSTS[role], "--port", str(AGENT_PORT), "--peers", f"file:{agents}"]
            argv += ["--allow-shared-cores", "--connector", self._connector]
            argv += ["--start-timeout", str(setup.start_s), "--"]
            argv += [*setup.limits.engine_args, *setup.args]
            log = setup.folder / f"{self._connector}-{role}.log"
            self._stack.enter_context(subprocesses.guarded(argv, env, log))
        argv = [str(CLEAVE), "gateway", "--agents", f"file:{agents}"]
        argv += ["--port", str(GATEWAY_PORT), "--internal-port", "0"]
        log = setup.folder / f"{self._connector}-gateway.log"
        self._stack.enter_context(subprocesses.guarded(argv, env, log))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get_health(self, role: str) -> agent_pb2.HealthResponse | None:
        """What an agent reports; None while it does not answer."""
        with (
            grpc.insecure_channel(f"{HOSTS[role]}:{AGENT_PORT}") as channel,
            suppress(grpc.RpcError),
        ):
            stub = agent_pb2_grpc.AgentStub(channel)
            return stub.Health(agent_pb2.HealthRequest(), timeout=5)
        return None

    def await_ready(self) -> dict[str, agent_pb2.HealthResponse]:
        """Wait until each engine is ready. Raises TimeoutError with the log's end."""
        deadline = time.monotonic() + self._setup.start_s
        while True:
            found = {role: self.get_health(role) for role in self._roles}
            ready = {role: health for role, health in found.items() if health and is_ready(health)}
            if len(ready) == len(found):
                return ready
            if time.monotonic() > deadline:
                logs = [
                    self._setup.folder / f"{self._connector}-{role}.log" for role in self._roles
                ]
                ends = "\n".join(log.read_text(errors="replace")[-1_500:] for log in logs)
                raise TimeoutError(
                    f"engines are not ready after {self._setup.start_s:.0f} s: {ends}"
                )
            time.sleep(1)

    def get_engine_url(self, role: str) -> str:
        """Where an engine serves, without the gateway."""
        health = self.get_health(role)
        assert health
        return str(health.registration.engine_url)

    def get_boot_id(self, role: str) -> str:
        """Changes when the engine is started again; empty while its agent does not answer."""
        health = self.get_health(role)
        return str(health.registration.boot_id) if health else ""

    def find_engine(self, role: str) -> psutil.Process:
        """The engine's API server."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = process.cmdline()
                if (
                    f"{HOSTS[role]}" in line
                    and "cleave_worker.agent.main" not in line
                    and any("vllm" in word for word in line[:4])
                ):
                    return process
        raise LookupError(f"no engine of {role}")


def is_ready(health: agent_pb2.HealthResponse) -> bool:
    """Whether the engine serves, its KV path tested."""
    return health.registration.state == agent_pb2.STATE_READY


def make_prompt(tokens: int, seed: int) -> list[int]:
    """A prompt that no prefix cache has."""
    return draw_prompt(random.Random(seed), tokens)


def complete(url: str, prompt: list[int], cache_salt: str = "") -> tuple[str, float, float]:
    """Greedy text, time to first token in ms, time per further token in ms. `cache_salt`: only KV
    of requests with the same one is used again. Raises httpx.HTTPError."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    body |= {"cache_salt": cache_salt} if cache_salt else {}
    begun, text, times, rest = time.perf_counter(), "", [], b""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=REQUEST_S) as response:
        response.raise_for_status()
        # Not by lines: httpx takes also letters of random texts for line ends.
        for piece in response.iter_bytes():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    content = json.loads(event[6:])
                    if "error" in content:
                        raise httpx.RemoteProtocolError(f"in the stream: {content['error']}")
                    text += content["choices"][0]["text"]
                    times.append(time.perf_counter())
    if not times:
        raise httpx.RemoteProtocolError("a stream without a token")
    ttft_ms = 1e3 * (times[0] - begun)
    return text, ttft_ms, 1e3 * (times[-1] - times[0]) / max(1, OUTPUT_TOKENS - 1)


def measure_engine(setup: Setup) -> Iterator[Row]:
    """One engine: the proof that agent, launch and plug-ins run here; loads, and its profile."""
    # What an earlier run has left would pass for results of this one.
    for file in (setup.folder / PROFILE, *setup.folder.glob("load-*.npz")):
        file.unlink(missing_ok=True)
    (setup.folder / LIMITS).write_text(json.dumps(asdict(setup.limits)))
    begun = time.monotonic()
    with EnginePair(setup, "cleave", ["decode"]) as engine:
        engine.await_ready()
        yield Row("engine", "start to ready", time.monotonic() - begun, "s")
        url = engine.get_engine_url("decode")
        text, ttft_ms, tpot_ms = complete(url, make_prompt(setup.limits.prompts[0], 1))
        yield Row("engine", "time to first token, cold", ttft_ms, "ms", f"{len(text)} characters")
        yield Row("engine", "time per token", tpot_ms, "ms")
        yield from serve_loads(setup, engine.gateway, url)
        yield write_profile(setup, url)


def write_profile(setup: Setup, url: str) -> Row:
    """The engine's profile; a row without a value: there is none."""
    profile = setup.folder / PROFILE
    argv = [str(CLEAVE), "profile", url, "-O", str(profile), "--force", *setup.profile_args]
    begun = time.monotonic()
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROFILE_S, check=False)
    except subprocess.TimeoutExpired:
        return Row("engine", "cleave profile", note=f"not done in {PROFILE_S:.0f} s")
    if done.returncode:
        return Row("engine", "cleave profile", note=f"failed: {done.stderr[-200:]}")
    return Row("engine", "cleave profile", time.monotonic() - begun, "s", f"{PROFILE} is written")


def serve_loads(setup: Setup, gateway: str, url: str) -> Iterator[Row]:
    """Open-loop loads through the gateway, recorded for `simulate_load`."""
    if setup.data is None:
        return
    lengths = read_lengths(setup.data, 1.0, MAX_REQUEST_TOKENS)
    clients = OpenAIClient(gateway, MODEL, timeout_s=REQUEST_S), [OpenAIClient(url, MODEL)]
    for seed, rate in enumerate(setup.rates):
        trace = draw_trace(lengths, rate, round(rate * setup.load_s), seed)
        seen = asyncio.run(offer(clients[0], trace, 1.0, seed, clients[1]))
        keep(setup.folder / f"load-{rate:g}.npz", trace, seen, np.zeros(0))
        note = f"of {len(trace)}; {seen.faults[0]}" if seen.faults else f"of {len(trace)}"
        yield Row("engine", f"failed requests at {rate:g}/s", len(seen.faults), "", note)
        measured = {"first token": seen.first_token_ms, "time per token": seen.tpot_ms(trace)}
        for name, times in measured.items():
            p50, p90, p99 = np.nanpercentile(times, (50, 90, 99))
            yield Row(
                "engine", f"{name} at {rate:g}/s, p50", p50, "ms", f"p90 {p90:.1f}, p99 {p99:.1f}"
            )


def measure_pair(setup: Setup, connector: str) -> Iterator[Row]:
    """Prefill and decode on this GPU: self-test, texts, latencies, kills."""
    part = f"pair {connector}"
    begun = time.monotonic()
    with EnginePair(setup, connector, ["prefill", "decode"]) as pair:
        ready = pair.await_ready()
        yield Row(part, "start to ready", time.monotonic() - begun, "s")
        for role, health in ready.items():
            path = health.registration.kv_path
            yield Row(part, f"KV self-test, {role}", path.bytes_per_s / 1e9, "GB/s", path.detail)
        whole_url = pair.get_engine_url("decode")
        for tokens in setup.limits.prompts:
            prompts = [make_prompt(tokens, seed) for seed in range(setup.num_requests)]
            split = [complete(pair.gateway, prompt) for prompt in prompts]
            # The decode engine has the transferred KV in its cache, which the salt hides. Then it
            # finds its own KV there: like a split request, it computes only the end.
            for what in ("computes all", "has the prompt in its cache"):
                whole = [complete(whole_url, prompt, "whole") for prompt in prompts]
                equal = sum(one[0] == other[0] for one, other in zip(split, whole, strict=True))
                note = f"of {len(prompts)} split requests, {tokens} tokens"
                yield Row(part, f"texts equal to those of one engine that {what}", equal, "", note)
            for name, index in (("first token", 1), ("each further token", 2)):
                found = statistics.median(answer[index] for answer in split)
                yield Row(part, f"time to {name}, {tokens} tokens", found, "ms", "low load, median")
        yield from kill_one(pair, part, "decode", "prefill")
        pair.await_ready()
        yield from kill_one(pair, part, "prefill", "decode")


def measure_simulated(setup: Setup) -> Iterator[Row]:
    """What the simulator says of requests and loads in the folder, from the engine's own profile;
    needs no GPU."""
    profile = setup.folder / PROFILE
    if not profile.exists():
        yield Row("simulated", "simulator", note=f"not run: {profile} was not written")
        return
    limits = Limits(**json.loads((setup.folder / LIMITS).read_text()))
    yield from simulate_requests(setup, profile, limits)
    for file in sorted(setup.folder.glob("load-*.npz")):
        yield from simulate_load(file, profile, limits)


def simulate_load(file: Path, profile: Path, limits: Limits) -> Iterator[Row]:
    """The same arrivals and lengths on one simulated instance, beside what clients saw."""
    measured = named_profiles.load_profile(str(profile))
    engine = SimulatedEngine(
        measured.timing,
        measured.kv_capacity_tokens,
        limits.block_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_batched_tokens,
    )
    dispatch_ms = read_profile(profile).dispatch_ms
    trace, seen, _ = recall(file)
    sent, seen = as_sent(trace, seen)
    pools = (SimulatedPool(engine, 1),)
    outcome = run.simulate(SimulatedFleet(mixed=pools, dispatch_ms=dispatch_ms), sent)
    for name, real, simulated in (
        ("first token", seen.first_token_ms, outcome.ttft_ms),
        ("time per token", seen.tpot_ms(sent), outcome.tpot_ms),
    ):
        for percentile in (50, 90, 99):
            found, said = (
                np.nanpercentile(real, percentile),
                np.nanpercentile(simulated, percentile),
            )
            note = f"measured {found:.1f}, {said / found - 1:+.1%}"
            yield Row("simulated", f"{name}, {file.stem}/s, p{percentile}", said, "ms", note)


def simulate_requests(setup: Setup, profile: Path, limits: Limits) -> Iterator[Row]:
    """One request at a time on a simulated pair."""
    for tokens in limits.prompts:
        lengths = {
            "promptTokens": {"mean": tokens, "p90": tokens},
            "outputTokens": {"mean": 16, "p90": 16},
        }
        pools = [{"role": "prefill"}, {"role": "decode"}]
        manifest = {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": MODEL},
            "spec": {
                "model": {"source": str(setup.model), "servedName": MODEL},
                "slo": {"ttftMs": 10_000, "tpotMs": 1_000},
                "engine": {"type": "Emulated", "emulated": {"latency": str(profile)}},
                "placement": {"manual": pools},
                "workload": {"rate": 0.1, **lengths},
            },
        }
        file = setup.folder / "simulated.yaml"
        file.write_text(yaml.safe_dump(manifest))
        argv = [str(CLEAVE), "simulate", "-f", str(file), "--requests", "200", "-o", "json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            yield Row("simulated", "pair", note=f"not run: {done.stderr.strip()[-200:]}")
            return
        (simulated,) = json.loads(done.stdout)
        for name, key in (("first token", "ttftMs"), ("each further token", "tpotMs")):
            what = f"time to {name} of a pair, {tokens} tokens"
            yield Row("simulated", what, simulated[key]["p50"], "ms", "from the engine's profile")


def kill_one(pair: EnginePair, part: str, victim: str, survivor: str) -> Iterator[Row]:
    """Kill an engine and send requests: the other must live, and be of use."""
    before = pair.get_boot_id(survivor)
    process = pair.find_engine(victim)
    process.kill()
    failed = 0
    for seed in range(3):
        try:
            complete(pair.gateway, make_prompt(200, 1_000 + seed))
        except httpx.HTTPError:
            failed += 1
    lives = pair.get_boot_id(survivor) == before
    note = f"{failed} of 3 requests failed meanwhile"
    yield Row(part, f"{survivor} lives after {victim} was killed", float(lives), "", note)
