"""The same on real vLLM: answers compared with those of an undisturbed run.

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

from e2e.chaos import faults, network
from e2e.chaos.expected_output import CHAT, COMPLETIONS, Expected
from e2e.chaos.fleet import Fleet, Shape, raised
from e2e.chaos.load import Load
from e2e.chaos.machine import Machine
from e2e.chaos.report import Report, ReportProgress, run_storm
from e2e.chaos.requests import Ask
from e2e.chaos.verdict import read_whole

NAME = "tiny"
UP_S = 600
ASK_S = 300
"""For an answer beforehand; the first of an engine takes a minute where the machine is busy."""
KINDS = {
    "kill engine": 2,
    "kill agent": 1,
    "kill worker": 1,
    "hang engine": 2,
    "hang agent": 3,
    "kill gateway": 2,
    "kill gateway process": 2,
    "freeze gateway": 3,
    "freeze gateway process": 3,
    "freeze gateway loop": 3,
    "starve gateway": 3,
}
"""Kind -> how often, against the others. An engine takes a minute of a core to start, the rest of
the kinds take seconds."""
CUTS = {"cut engine": 3, "cut KV": 3, "cut agent": 2}
CLIENTS = 3
WAIT_S = 300.0
PROMPTS = 8


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
        kinds = KINDS | CUTS if network.can_cut() else KINDS
        gateways = {gateway.name: gateway.processes for gateway in fleet.gateways}
        drawn = faults.draw(
            random.Random(options.seed),
            options.faults,
            {kind: weight for kind, weight in kinds.items() if kind in (options.only or kinds)},
            fleet.roles,
            gateways,
            options.gap,
        )
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
            options.burst,
            options.seed,
            report_progress,
            lasting_s=options.seconds,
            serving_left=shape.mixed,
            wait_s=WAIT_S,
            back_s=WAIT_S,
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
        body = {"model": NAME, "max_tokens": rng.choice((12, 80, 160)), "temperature": 0}
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
