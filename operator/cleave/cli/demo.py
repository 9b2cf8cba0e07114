"""`cleave demo` (`make run`): prefill and decode on this machine, one question, its answer.

The same path as `cleave up`, with a deployment made here instead of read from a file.
"""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cleave.cli.faults import FAILED, fail, told
from cleave.cli.up import Port, SharedCores, Timeout

if TYPE_CHECKING:
    from rich.console import Console

    from cleave.api.deployment import LLMDeployment
    from cleave.local.chat import Answer
    from cleave.local.job import Job

NAME = "demo"
PROMPT = "Tell me why prefill and decode should run apart."
_MAX_TOKENS = 64
_TINY = "tiny-llama"
_EMULATED_MODEL = "facebook/opt-13b"
_MEMORY = {"memory": "3Gi"}
"""Of one vLLM process with the tiny model and 1 GiB of KV cache."""


class EngineName(StrEnum):
    """Which engine the demo runs."""

    VLLM = "vllm"
    EMULATED = "emulated"


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id or folder; absent: a tiny random model made here."),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="vLLM, or one that emulates its timings without a model.")
    ] = EngineName.VLLM,
    port: Port = 8080,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
    timeout: Timeout = 900,
    allow_shared_cores: SharedCores = False,
) -> None:
    """Start a prefill and a decode instance and a gateway here, and chat with them.

    Examples: cleave demo --once; cleave demo --engine emulated; cleave demo --model Qwen/Qwen3-0.6B
    """
    from rich.console import Console

    from cleave.api.engine import EngineType
    from cleave.local import node, planning
    from cleave.planner.placement import plan

    with told():
        emulated = engine is EngineName.EMULATED
        planning.must_be_installed(EngineType.EMULATED if emulated else EngineType.VLLM)
        machine = node.inspect()
        deployment = emulated_deployment(model) if emulated else vllm_deployment(model)
        job = planning.plan_job(
            deployment, plan(deployment), machine, port, allow_shared_cores=allow_shared_cores
        )
        console = Console(highlight=False)
        _introduce(console, job, emulated=emulated, tiny=model is None)
        answered = asyncio.run(_run(job, console, prompt, once=once, timeout_s=timeout))
    if not answered:
        fail(["stopped before the question was answered"], FAILED)


def emulated_deployment(model: str | None) -> "LLMDeployment":
    """One prefill and one decode instance of the emulated engine."""
    source = model or _EMULATED_MODEL
    return _deployment({"source": source}, {"engine": {"type": "Emulated"}})


def vllm_deployment(model: str | None) -> "LLMDeployment":
    """One prefill and one decode instance of vLLM; the tiny model is made if none is named."""
    from cleave.local import tiny_model

    if model is None:
        tiny = {"source": str(tiny_model.cached()), "servedName": _TINY}
        # The default, meant for any model, would be too much for a laptop.
        return _deployment(tiny, {"template": {"resources": {"limits": _MEMORY}}})
    folder = Path(model)
    return _deployment({"source": str(folder.absolute()) if folder.is_dir() else model}, {})


def _deployment(model: dict[str, Any], spec: dict[str, Any]) -> "LLMDeployment":
    from cleave.api.manifest import ManifestError, validate

    slo = {"ttftMs": 2000, "tpotMs": 200}
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {"model": model, "slo": slo, **spec},
    }
    try:
        return validate(manifest)
    except ManifestError as error:
        fail(error.faults, 2)


def _introduce(console: "Console", job: "Job", *, emulated: bool, tiny: bool) -> None:
    from cleave.local import state

    where = f"on {len(job.node.gpus)} GPUs" if job.node.gpus else "on CPU"
    engine = "the emulated engine (vLLM's API and timings, no model)" if emulated else "vLLM"
    console.print(f"[bold]Cleave demo[/]: one prefill and one decode instance of {engine} {where}.")
    if tiny and not emulated:
        console.print("The model is tiny, random and made on the spot: its answers are gibberish.")
    if emulated:
        console.print("Its answers are made-up words; only API, hand-off and timings are real.")
    console.print(f"[dim]logs: {state.folder(job.deployment).path / 'logs'}[/]\n")


async def _run(
    job: "Job", console: "Console", prompt: str, *, once: bool, timeout_s: float
) -> bool:
    """Whether the question was answered. Everything has ended when this returns."""
    from cleave.cli.screen import print_line, progress
    from cleave.local import state, up
    from cleave.local.following import watch

    up.check(job)
    async with up.running(job, progress(console), timeout_s) as supervisor:
        talk = asyncio.create_task(_talk(job, console, prompt))
        end = asyncio.create_task(supervisor.stopping())
        await asyncio.wait((talk, end), return_when=asyncio.FIRST_COMPLETED)
        if not talk.done():
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            return False
        try:
            talk.result()
            if not once:
                console.print("\nCtrl-C ends it.")
                await watch(state.folder(job.deployment), lambda line: print_line(console, line))
        finally:
            end.cancel()
            console.print("[dim]stopping[/]")
    return True


async def _talk(job: "Job", console: "Console", prompt: str) -> None:
    from cleave.local import chat

    body = {
        "model": job.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    console.print(f"\n[bold]you[/]    {prompt}")
    console.print("[bold]model[/]  ", end="")
    answer = await chat.ask(
        job.url, body, lambda text: console.print(text, end="", markup=False, style="cyan")
    )
    console.print("\n")
    await _report(job, console, answer)
    shown = json.dumps({**body, "stream": True}, ensure_ascii=False).replace("'", r"'\''")
    console.print("\nAsk it yourself:")
    typer.echo(
        f"  curl -N {job.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{shown}'"
    )


async def _report(job: "Job", console: "Console", answer: "Answer") -> None:
    """Figures of the answer, and what carried it."""
    from rich.table import Table

    from cleave.cli.status import collect, show
    from cleave.local import gateways

    found = await collect(job.deployment)
    handed_over = await gateways.handoffs(job.url)
    figures = Table.grid(padding=(0, 2))
    figures.add_row("prompt", f"{answer.prompt_tokens} tokens")
    figures.add_row("answer", f"{answer.output_tokens} tokens")
    figures.add_row("time to first token (TTFT)", f"{answer.ttft_ms:.0f} ms")
    figures.add_row("time per token after it (TPOT)", f"{answer.tpot_ms:.1f} ms")
    figures.add_row("KV hand-offs used", str(handed_over))
    for row in (row for each in found for row in each["instances"]):
        if row["kv_path"]:
            figures.add_row(f"KV path of {row['instance']}", row["kv_path"])
    console.print(figures)
    show(console, found)
