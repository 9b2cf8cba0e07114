"""DeepSeek-V3 on 32 to 128 GPUs: Cleave's predictions and plans beside published deployments.

    .venv/bin/python benchmarks/wide/run.py [units] [sizes] [plans]    # three minutes, no GPU

`units`: tokens per second of one GPU of the published instances, predicted at the published load.
`sizes`: goodput of one GPU by size of the instance, for each phase alone (DistServe's simu_prefill
and simu_decode), in short trials.
`plans`: the plan for a rate that needs most of the GPUs, with and without data and expert
parallelism. README.md has the sources and says why figures differ.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.role import Parallelism, Role
from cleave.perf import estimator
from cleave.perf.hardware.all_to_all import AllToAllBackend
from cleave.perf.hardware.expert_group import BALANCED, ExpertSettings
from cleave.perf.model.model_shape import load_shape
from cleave.planner import plan_search, problem_from_cluster
from cleave.planner.plan import Plan
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_plan
from cleave.planner.search import goodput, high_affinity
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext

MODEL = "deepseek-ai/DeepSeek-V3"
ARGS = ("--all2all-backend=deepep_v2", "--enable-eplb")
PROMPT, OUTPUT = 2000, 500


@dataclass(frozen=True)
class Machines:
    """Equal nodes of one kind of GPU, with 400 Gbit/s for each."""

    gpu: str
    nodes: int
    gpus_per_node: int = 8
    nvlink_gpus: int | None = None

    def build_cluster(self) -> Cluster:
        """As a cluster file describes them."""
        group = {"count": self.nodes, "gpu": self.gpu, "gpusPerNode": self.gpus_per_node}
        if self.nvlink_gpus:
            group["nvlinkGPUs"] = self.nvlink_gpus
        network = {"kind": "InfiniBand", "bandwidthGbps": 400}
        return Cluster.model_validate({"nodes": [group], "network": network})


NVL72 = Machines("GB200", 18, 4, 72)


@dataclass(frozen=True)
class Unit:
    """One published instance and its load."""

    source: str
    machines: Machines
    role: Role
    tensor: int
    data: int
    rows: int
    """Requests at once on each rank; of prefill: tokens of an iteration."""
    context: int
    """Tokens of a prompt, or of a request that decodes."""
    published: float | None
    """Tokens per second and GPU; None: not published."""


H800 = Machines("H800", 64)
UNITS = (
    Unit("DeepSeek, inference system", H800, Role.PREFILL, 1, 32, 16384, 4096, 4026),
    Unit("DeepSeek, inference system", H800, Role.DECODE, 1, 144, 88, 4989, 1850),
    Unit("DeepSeek-V3 report", H800, Role.PREFILL, 4, 8, 16384, 4096, None),
    Unit("DeepSeek-V3 report", H800, Role.DECODE, 4, 80, 256, 4989, None),
    Unit("SGLang, 96 H100", Machines("H100", 12), Role.PREFILL, 1, 32, 16384, 2048, 6818),
    Unit("SGLang, 96 H100", Machines("H100", 12), Role.PREFILL, 1, 32, 16384, 4096, 6288),
    Unit("SGLang, 96 H100", Machines("H100", 12), Role.DECODE, 1, 72, 256, 2050, 2785),
    Unit("vLLM, H200", Machines("H200", 12), Role.DECODE, 1, 16, 128, 3000, 2200),
    Unit("vLLM, H200", Machines("H200", 12), Role.DECODE, 1, 32, 128, 3000, 2200),
    Unit("SGLang, GB200, FP8", NVL72, Role.PREFILL, 1, 8, 16384, 2048, 18471),
    Unit("SGLang, GB200, FP8", NVL72, Role.DECODE, 1, 48, 768, 2050, 9087),
)


def predict_unit(unit: Unit) -> float | None:
    """Tokens per second and GPU, kernels of DeepEP or NVLink, experts balanced; None: the instance
    is not supported."""
    backend = AllToAllBackend.NVLINK if unit.machines.nvlink_gpus else AllToAllBackend.DEEPEP
    settings = ExpertSettings(backend, BALANCED)
    built = estimator.build_estimator(
        load_shape(MODEL), unit.machines.build_cluster(), experts=settings
    )
    (gpu,) = built.machines
    found = built.estimate(gpu, unit.tensor, 1, unit.data, expert=True)
    if found is None:
        return None
    if unit.role is Role.PREFILL:
        prompts = [unit.context] * (unit.rows // unit.context)
        tokens, ms = sum(prompts), found.timing.predict_prefill_ms(prompts)
    else:
        tokens, ms = unit.rows, found.timing.predict_decode_ms(unit.rows, unit.rows * unit.context)
    return tokens / ms * 1000 / unit.tensor


@dataclass(frozen=True)
class Question:
    """A rate for some machines, within TTFT 2 s and TPOT `tpot_ms` for 90 % of the requests."""

    machines: Machines
    rate: float
    tpot_ms: float = 50.0
    args: tuple[str, ...] = ARGS

    def build_problem(self) -> Problem:
        """The planner's problem."""
        deployment = LLMDeployment.model_validate(
            {
                "metadata": {"name": "deepseek"},
                "spec": {
                    "model": MODEL,
                    "engine": {"args": list(self.args)},
                    "workload": {
                        "rate": self.rate,
                        "promptTokens": {"mean": PROMPT, "p90": 1.8 * PROMPT},
                        "outputTokens": {"mean": OUTPUT, "p90": 1.9 * OUTPUT},
                    },
                    "slo": {"ttftMs": 2000, "tpotMs": self.tpot_ms},
                },
            }
        )
        return problem_from_cluster.build_problem(deployment, self.machines.build_cluster())


NVLINK_ARGS = ("--all2all-backend=flashinfer_nvlink_two_sided", "--enable-eplb")
QUESTIONS = (
    Question(Machines("H200", 4), 38),
    Question(Machines("H200", 8), 76),
    Question(Machines("H200", 16), 152),
    Question(Machines("H200", 16), 152, args=()),
    Question(Machines("H200", 16), 76, tpot_ms=30),
    Question(Machines("H100", 12), 76),
    Question(NVL72, 150, args=NVLINK_ARGS),
    Question(NVL72, 75, tpot_ms=25, args=NVLINK_ARGS),
)


def answer(problem: Problem) -> Plan | None:
    """The selected plan, or the one that serves most."""
    return plan_search.plan(problem).best


def describe(plan: Plan | None, rate: float) -> tuple[str, str, str]:
    """Pools, GPUs, and what the plan serves."""
    if plan is None:
        return "none", "-", "-"
    goodput = plan.prediction.goodput
    missed = "" if goodput >= rate else " (of all GPUs)"
    tokens = (PROMPT + OUTPUT) * goodput / plan.gpus
    return format_plan(plan), str(plan.gpus), f"{goodput:.0f} req/s{missed}, {tokens:,.0f} tok/s"


def show_units(console: Console) -> None:
    """Print predicted beside published throughput."""
    table = Table("source", "instance", "load of a rank", "published", "predicted", "difference")
    for unit in UNITS:
        size = f"TP{unit.tensor} DP{unit.data} EP{unit.tensor * unit.data}"
        rows = f"{unit.rows} tokens" if unit.role is Role.PREFILL else f"{unit.rows} requests"
        found = predict_unit(unit)
        both = found and unit.published
        table.add_row(
            f"{unit.source} ({unit.machines.gpu})",
            f"{unit.role} {size}",
            f"{rows}, context {unit.context}",
            f"{unit.published:,.0f}" if unit.published else "-",
            f"{found:,.0f}" if found else "too few experts",
            f"{100 * (found / unit.published - 1):+.0f} %" if both else "-",
        )
    console.print("Tokens per second and GPU", table, sep="\n")


SIZES = (
    *(Parallelism(pipeline=stages) for stages in (7, 11, 13, 16, 21, 31)),
    *(Parallelism(tensor=8), Parallelism(tensor=8, expert=True)),
    *(Parallelism(data=ranks, expert=True) for ranks in (8, 16, 32, 64)),
    *(Parallelism(tensor=4, data=ranks, expert=True) for ranks in (2, 8)),
)


def measure_size(problem: Problem, size: Parallelism) -> Iterator[str]:
    """Requests per second and GPU of an instance of this size, in prefill and in decode; pipelines
    decode too slowly to be of interest."""
    search = SearchContext.from_problem(problem)
    found = [each for each in list_candidates(problem) if each.parallelism == size]
    for role in (Role.PREFILL, Role.DECODE):
        targets = search.targets
        alone = targets.prefill_only if role is Role.PREFILL else targets.decode_only
        for candidate in found:
            if role is Role.DECODE and size.pipeline > 1:
                yield "-"
                continue
            single = high_affinity.build_single(problem, candidate, role)
            fleet = replace(build_cell(problem, single), first_token_by_decode=False)
            served = goodput.find_goodput(search.trials, fleet, alone)
            yield f"{served.rate / candidate.gpus:.2f}"


def show_sizes(console: Console) -> None:
    """Print the goodput of one GPU by size."""
    kinds = (Machines("H200", 16), Machines("H100", 12))
    names = (f"{each.gpu} {role}" for each in kinds for role in ("prefill", "decode"))
    table = Table("size", *names)
    problems = [Question(each, 76).build_problem() for each in kinds]
    for size in SIZES:
        cells = [list(measure_size(problem, size)) or ["-", "-"] for problem in problems]
        name = f"TP{size.tensor} PP{size.pipeline} DP{size.data}" + (" EP" if size.expert else "")
        table.add_row(name, *cells[0], *cells[1])
    console.print(
        "Requests per second and GPU, TPOT 50 ms; -: does not fit, or not tried", table, sep="\n"
    )


def show_plans(console: Console) -> None:
    """Print a plan for each question, with and without data and expert parallelism."""
    table = Table("machines", "rate", "TPOT", "plan", "GPUs", "serves, per GPU", "before", "GPUs")
    for question in QUESTIONS:
        problem, machines = question.build_problem(), question.machines
        # Without experts in its shape, a model gets no such sizes; times still have them.
        before = replace(problem, shape=replace(problem.shape, experts=None))
        plan, other = answer(problem), answer(before)
        backend = "" if question.args else ", vLLM's defaults"
        table.add_row(
            f"{machines.nodes * machines.gpus_per_node} {machines.gpu}{backend}",
            f"{question.rate:g}",
            f"{question.tpot_ms:g}",
            *describe(plan, question.rate),
            *describe(other, question.rate)[:2],
        )
    console.print("Plans", table, sep="\n")


def main() -> None:
    """Run the parts named on the command line."""
    parts = {"units": show_units, "sizes": show_sizes, "plans": show_plans}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    console = Console(width=200)
    for part in parser.parse_args().parts or parts:
        parts[part](console)


if __name__ == "__main__":
    main()
