"""What `cleave plan` answers to commands that once got a wrong answer or none.

    python benchmarks/planner/answers.py
    python benchmarks/planner/answers.py --checkout ~/cleave-04ea2f62 --only planned

Prints a row for each command: the exit code, the sentence of the answer, CPU seconds.
"""

import argparse
import json
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LLAMA_8B, _LLAMA_70B, _OPT = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "opt-13b"
_FLAGS = (
    "--gpu-memory-utilization=0.3",
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--block-size=256",
    "--cpu-offload-gb=40",
    "--max-num-seqs=4",
)


@dataclass(frozen=True)
class Question:
    """A manifest, machines, and what the command line gives instead. Without the first two: the
    examples' own."""

    name: str
    spec: dict[str, object] | None = None
    cluster: dict[str, object] | None = None
    options: str = ""


def build_spec(
    model: str, rate: float, tokens: tuple[int, int], slo_ms: tuple[float, float], **more: object
) -> dict[str, object]:
    """`tokens`: mean prompt and answer; `slo_ms`: TTFT and TPOT."""
    prompt, output = ({"mean": each} | ({"p90": 2 * each} if each > 1 else {}) for each in tokens)
    return {
        "model": model,
        "slo": {"ttftMs": slo_ms[0], "tpotMs": slo_ms[1]},
        "workload": {"rate": rate, "promptTokens": prompt, "outputTokens": output},
        **more,
    }


def build_cluster(num_nodes: int, gpu: str, gbps: float) -> dict[str, object]:
    """Nodes of 8 GPUs."""
    nodes = {"count": num_nodes, "gpu": gpu, "gpusPerNode": 8}
    return {"nodes": [nodes], "network": {"kind": "InfiniBand", "bandwidthGbps": gbps}}


def list_questions() -> list[Question]:
    """Looser targets, more GPUs, engine arguments, lengths and rates at the limits."""
    a100s = build_cluster(4, "A100-SXM-80GB", 25)
    h100s = build_cluster(8, "H100-SXM-80GB", 400)
    opt = build_spec(f"facebook/{_OPT}", 16, (400, 90), (400, 30))
    chat, usual = (800, 200), (500, 30)
    limits = {
        "answers of one token": (40, (800, 1), usual),
        "prompts of 120,000": (1, (120_000, 200), (30_000, 50)),
        "prompts of 128,000": (1, (128_000, 200), (30_000, 50)),
        "prompts of 200,000": (1, (200_000, 200), (30_000, 50)),
        "0.001 req/s": (0.001, chat, usual),
        "10,000 req/s": (10_000, chat, usual),
        "100,000 req/s": (100_000, chat, usual),
        "TTFT 1 ms": (40, chat, (1, 30)),
        "TPOT 0.1 ms": (40, chat, (500, 0.1)),
    }
    return [
        *(Question(f"planned, TPOT {ms}", options=f"--slo-tpot {ms}") for ms in (22, 24, 26)),
        Question("planned, cells' rate unknown", cluster=a100s),
        *(
            Question(f"{_OPT}, 16 req/s, maxGPUs {number}", opt | {"planning": {"maxGPUs": number}})
            for number in (6, 8)
        ),
        *(
            Question(f"70B, TTFT {ms}", build_spec(_LLAMA_70B, 12, (1000, 250), (ms, 25)), h100s)
            for ms in (500, 600, 800)
        ),
        *(
            Question(f"8B {flag}", build_spec(_LLAMA_8B, 40, chat, usual, **more), h100s)
            for flag, more in (("", {}), *((each, {"engine": {"args": [each]}}) for each in _FLAGS))
        ),
        *(
            Question(f"8B, {name}", build_spec(_LLAMA_8B, *given), h100s)
            for name, given in limits.items()
        ),
    ]


def ask(question: Question, checkout: Path) -> str:
    """A row of the table."""
    header = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    with tempfile.TemporaryDirectory() as folder:
        manifest, cluster = checkout / "examples/planned.yaml", checkout / "examples/cluster.yaml"
        if question.spec:
            manifest = Path(folder) / "question.yaml"
            named = {**header, "metadata": {"name": "question"}, "spec": question.spec}
            manifest.write_text(json.dumps(named))
        if question.cluster:
            cluster = Path(folder) / "cluster.yaml"
            cluster.write_text(json.dumps(question.cluster))
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [checkout / ".venv/bin/cleave", "plan", "-f", manifest, "--cluster", cluster]
        answer = subprocess.run(
            [*command, *question.options.split()], capture_output=True, text=True, check=False
        )
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    lines = answer.stdout.splitlines() or answer.stderr.splitlines()
    text = next((each for each in lines[:2] if " holds " in each), lines[0])
    return f"| {question.name} | {answer.returncode} | {text} | {seconds:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=_ROOT, help="with a .venv of its own")
    parser.add_argument("--only", default="", help="questions whose names begin so")
    given = parser.parse_args()
    print("| question | exit code | answer | CPU s |\n|---|---|---|---|")
    for question in list_questions():
        if question.name.startswith(given.only):
            print(ask(question, given.checkout), flush=True)


if __name__ == "__main__":
    main()
