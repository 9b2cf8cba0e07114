"""The same on real vLLM: a few kills and hangs, answers compared with those of an undisturbed run.

What is hard: nothing but the engines themselves knows what they have to answer. So every prompt is
sent beforehand, one at a time, to a fleet without faults.
"""

import argparse
import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from cleave.local.tiny_model import build

from e2e.chaos.expected_output import CHAT, COMPLETIONS, Expected
from e2e.chaos.faults import Fault
from e2e.chaos.fleet import Fleet, Shape, raised
from e2e.chaos.load import Load
from e2e.chaos.machine import Machine
from e2e.chaos.report import Report, ReportProgress, run_storm
from e2e.chaos.requests import Ask
from e2e.chaos.verdict import read_whole

NAME = "tiny"
UP_S = 600
ASK_S = 60
KINDS = ("kill engine", "kill engine", "kill agent", "hang engine", "kill worker")
HANG_S = 8.0
CLIENTS = 3
WAIT_S = 300.0
PROMPTS = 16


def hurt_vllm(
    machine: Machine, options: argparse.Namespace, report_progress: ReportProgress
) -> Report:
    folder = machine.folder
    model = folder / "model"
    build(model)
    # Each instance takes a core for itself. The prefill instance serves when no other is left.
    shape = Shape(prefill=1, decode=1, mixed=int(len(os.sched_getaffinity(0)) > 2))
    with raised(build_manifest(model, shape), shape, folder, UP_S) as fleet:
        asks = prepare(fleet)
        drawn = draw_faults(options.seed, options.kills, fleet.roles, options.gap)
        load = Load(
            fleet.gateways,
            lambda rng, name: rename(rng.choice(asks), name),
            CLIENTS,
            options.seed,
        )
        storm = run_storm(
            fleet,
            machine,
            load,
            drawn,
            len(drawn),
            options.seed,
            report_progress,
            serving_left=shape.mixed,
            wait_s=WAIT_S,
        )
        return asyncio.run(storm)


def build_manifest(model: Path, shape: Shape) -> dict[str, Any]:
    pools = [{"role": role, "replicas": number} for role, number in shape.roles.items()]
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            # bfloat16, the engine's choice otherwise, makes ties that either side may break.
            "model": {
                "source": str(model),
                "servedName": NAME,
                "dtype": "float32",
                "maxModelLen": 2048,
            },
            "slo": {"ttftMs": 1000, "tpotMs": 200},
            "placement": {"manual": pools},
        },
    }


def draw_faults(seed: int, count: int, roles: dict[str, str], gap_s: float) -> list[Fault]:
    """Each role in turn, each in another way."""
    rng = random.Random(seed)
    names = sorted(roles)
    faults = []
    for number in range(count):
        first = number % len(names)
        victims = (*names[first:], *names[:first])
        kind = KINDS[number % len(KINDS)]
        faults.append(Fault(number, kind, victims[:1], HANG_S, gap_s * rng.uniform(5, 15), 1))
    return faults


def prepare(fleet: Fleet) -> list[Ask]:
    """Requests and the answers of engines that nothing happens to."""
    gateway = fleet.gateways[0]
    asks = []
    for number in range(PROMPTS):
        rng = random.Random(number)
        # The tiny model's tokenizer merges common words only: a capital letter is a token.
        letters = "".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=rng.choice((20, 200, 1_000))))
        path = CHAT if number % 2 else COMPLETIONS
        prompt = (
            {"messages": [{"role": "user", "content": letters}]}
            if path == CHAT
            else {"prompt": letters}
        )
        body = {"model": NAME, "max_tokens": rng.choice((12, 200, 400)), "temperature": 0}
        body |= {"ignore_eos": True} | prompt
        if number % 4 > 1:
            body["seed"] = number
            body["presence_penalty"] = 0.5
        answer = httpx.post(gateway.url + path, json=body, timeout=ASK_S)
        answer.raise_for_status()
        expected = read_expected(answer.json())
        asks.append(Ask(str(number), path, body, True, expected))
        more = {"stream": True, "stream_options": {"include_usage": True}}
        asks += [Ask(str(number), path, body | more, True, expected)] * 2
    return asks


def read_expected(body: dict[str, Any]) -> Expected:
    answer, usage = read_whole(body), body["usage"]
    return Expected(
        texts=tuple(answer.texts.values()),
        finishes=tuple(answer.finishes.values()),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def rename(ask: Ask, name: str) -> Ask:
    return replace(ask, name=f"{name} prompt {ask.name}")
