"""Plants faults in the KV path of an emulated fleet and measures how soon the witness takes the bad
pairs out, whether anything wrong is served after that, and what the canary handoffs cost.

README.md says what is planted. Exit code 1: a fault was not found, another pair was taken out, or
an answer after that was wrong.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cleave.rpc.engine_key import build_headers  # noqa: E402
from cleave.rpc.v1.agent_pb2 import TRUST_FAILED, Registration  # noqa: E402

from e2e.support.deployments import Deployment, deployed, emulated  # noqa: E402

NAME = "witnessed"
UP_S = 120
PATIENCE_S = 300
SETTLE_S = 60
"""Before costs are measured: until what the engines' shares have saved up is spent."""
FAULTS = ("empty", "lost", "layout", "stale", "swapped", "slow")
"""Of one pair; `emulator.faults.PairFault` says what each does."""
ANSWERS = 40
"""Requests that are checked while a fault lasts, after it was found."""


def main() -> int:
    """Run all faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.005, help="spec.witness.engineShare")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--only", action="append", choices=[*FAULTS, "card", "none"])
    parser.add_argument("--idle-s", type=float, default=120.0, help="measure costs for so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = build_manifest(options)
        with deployed(manifest, Path(folder), UP_S) as deployment:
            return run(deployment, options)


def build_manifest(options: argparse.Namespace) -> dict[str, object]:
    """The fleet, with two processes in its gateway."""
    manifest: dict[str, Any] = emulated(NAME, options.prefill, options.decode, options.time_scale)
    spec = manifest["spec"]
    kv_transfer = {"kv_load_failure_policy": "recompute"}
    args = ["--fault-injection", "--kv-transfer-config", json.dumps(kv_transfer)]
    spec["engine"]["args"] = args
    spec["gateway"] = {"processes": 2}
    spec["witness"] = {"engineShare": options.share}
    spec["pools"] = {"flipping": "Off"}
    return manifest


def run(deployment: Deployment, options: argparse.Namespace) -> int:
    """Plant one fault after the other, then measure what canaries cost an idle fleet."""
    if not options.share:
        measure_costs(deployment, options.prefill, options.decode, options.idle_s)
        return 0
    rng, is_good = random.Random(7), True
    total = options.prefill * options.decode
    started = time.monotonic()
    wait_until(lambda: count_pairs(deployment, "proven") == total, "all pairs are proven")
    print(f"all {total} pairs proven after {time.monotonic() - started:.0f} s")
    instances = deployment.instances()
    prefills = sorted(name for name in instances if "prefill" in name)
    decodes = sorted(name for name in instances if "decode" in name)
    kinds = options.only or [*FAULTS, "card"]
    for kind in [each for each in kinds if each != "none"]:
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        victims = decodes if kind == "card" else [decode]
        fault = "slow" if kind == "card" else kind
        for victim in victims:
            inject(instances[victim], {instances[prefill].boot_id: fault})
        planted = time.monotonic()
        bad = {(prefill, victim) for victim in victims}
        wait_until(lambda bad=bad: find_failed(deployment) >= bad, f"{kind} is found")
        seconds = time.monotonic() - planted
        taken_out = find_failed(deployment)
        is_right = check_answers(deployment, rng)
        is_good = is_good and taken_out == bad and is_right
        others = "no other pair" if taken_out == bad else f"also {sorted(taken_out - bad)}"
        print(f"{kind}: found after {seconds:.1f} s, {others} taken out, answers right: {is_right}")
        for victim in victims:
            inject(instances[victim], {})
        planted = time.monotonic()
        wait_until(lambda: not find_failed(deployment), "it is back")
        print(f"{kind}: back {time.monotonic() - planted:.1f} s after it was mended")
    measure_costs(deployment, options.prefill, options.decode, options.idle_s)
    return 0 if is_good else 1


def measure_costs(deployment: Deployment, prefill: int, decode: int, seconds: float) -> None:
    """Print the share of the engines' time, and the CPU of the gateway, that canaries take."""
    time.sleep(SETTLE_S)
    before, cpu = read_seconds(deployment), read_gateway_cpu(deployment)
    time.sleep(seconds)
    after, cpu = read_seconds(deployment), read_gateway_cpu(deployment) - cpu
    for phase, count in (("prefill", prefill), ("decode", decode)):
        spent = (after.get(phase, 0.0) - before.get(phase, 0.0)) / (count * seconds)
        print(f"{phase} engines: {spent:.3%} of their time in {seconds:.0f} s")
    print(f"gateway, with everything else that an idle one does: {cpu / seconds:.2%} of a core")
    canaries = read_metric(deployment, "cleave_gateway_kv_canaries_total")
    print(f"canaries by result: {canaries}")


def check_answers(deployment: Deployment, rng: random.Random) -> bool:
    """Whether requests get what another request with the same prompt, on one engine, gets."""
    for _ in range(ANSWERS):
        prompt = " ".join(f"{rng.random():.6f}" for _ in range(rng.randint(20, 200)))
        body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        split = ask(deployment, body)
        # Several choices are never split; their first one is the model's continuation. With a salt
        # of its own it finds no KV that a handoff has left in a cache.
        whole = ask(deployment, {**body, "n": 2, "cache_salt": f"{rng.random()}"})
        if split != whole:
            return False
    return True


def ask(deployment: Deployment, body: dict[str, object]) -> str:
    """The text of the first choice."""
    response = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=60)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def inject(engine: Registration, pairs: dict[str, str]) -> None:
    """Set the faults of an engine's pairs."""
    url, headers = f"{engine.engine_url}/emulator/faults", build_headers(engine.engine_key)
    httpx.post(url, json={"pairs": pairs}, headers=headers, timeout=5).raise_for_status()


def find_failed(deployment: Deployment) -> Collection[tuple[str, str]]:
    """(prefill, decode) of the pairs that the agents report as failed."""
    return {
        (proof.prefill, health.registration.instance)
        for health in deployment.healths()
        for proof in health.pairs.proofs
        if proof.trust == TRUST_FAILED
    }


def count_pairs(deployment: Deployment, state: str) -> float:
    """Pairs in a state, as the gateway reports them."""
    pairs = read_metric(deployment, "cleave_gateway_kv_pairs")
    return sum(value for labels, value in pairs.items() if f'state="{state}"' in labels)


def read_seconds(deployment: Deployment) -> dict[str, float]:
    """Seconds of engines that canaries took, by phase."""
    found = read_metric(deployment, "cleave_gateway_kv_canary_seconds_total")
    return {labels.split('"')[1]: value for labels, value in found.items()}


def read_metric(deployment: Deployment, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    page = httpx.get(f"{deployment.url}/metrics", timeout=30).text
    lines = [line for line in page.splitlines() if line.startswith(name + "{")]
    return {line[len(name) : line.rindex(" ")]: float(line.rsplit(" ", 1)[1]) for line in lines}


def read_gateway_cpu(deployment: Deployment) -> float:
    """CPU seconds of the gateway's processes so far."""
    seconds = 0.0
    for process in deployment.processes():
        try:
            if "cleave.gateway.main" in process.cmdline():
                times = process.cpu_times()
                seconds += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def wait_until(condition: Any, what: str) -> None:
    """Wait for a condition; ends the run when it does not come true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
