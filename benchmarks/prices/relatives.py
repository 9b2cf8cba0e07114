"""Whether a GPU without kernel tables is better priced from a relative's than from the roofline.

    .venv/bin/python benchmarks/prices/relatives.py        # seconds

Every GPU with tables takes its turn as one without: its passes from the tables of a relative, times
the ratio of the two rooflines, and from its own roofline, beside its own tables.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cleave.api.cluster import Cluster
from cleave.perf import host_launch
from cleave.perf.estimator import NodeType
from cleave.perf.hardware import inventory
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.kernels import composition, tables
from cleave.perf.model.model_shape import ModelShape, load_shape
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import Roofline
from cleave.perf.timing import EngineTiming

PAIRS = (
    ("H200-SXM-141GB", "H100-SXM-80GB"),
    ("B200-SXM-180GB", "H200-SXM-141GB"),
    ("H100-SXM-80GB", "A100-SXM-80GB"),
    ("A100-SXM-80GB", "H100-SXM-80GB"),
    ("L40S", "RTX-PRO-6000-Server"),
    ("RTX-PRO-6000-Server", "L40S"),
)
"""GPU, and its relative."""
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "gpt-oss-120b", "qwen3-30b-a3b")
TENSORS = (1, 2, 4)
PROMPTS = (128, 512, 1024, 2048, 4096, 8192)
BATCHES = ((1, 1000), (8, 16_000), (32, 64_000), (64, 128_000), (128, 256_000))
"""Requests, and all their contexts."""
Passes = dict[str, list[float]]
"""ms by phase."""


def time_kernels(shape: ModelShape, name: str, tensor: int) -> Passes | None:
    """Passes from a GPU's tables; None: these have not all kernels."""
    gpu = find_gpu(name)
    found = tables.find_tables(gpu)
    operators = composition.build_operators(shape, found, tensor) if found else None
    if operators is None:
        return None
    return time_passes(operator_fit.to_timing(operators, tensor), shape, name, tensor)


def time_roofline(shape: ModelShape, name: str, tensor: int) -> Passes:
    """The same from its roofline."""
    gpu = find_gpu(name)
    cluster = Cluster.model_validate({"nodes": [{"count": 1, "gpu": name}]})
    machine = NodeType(gpu, 8, inventory.find_network_link(cluster, gpu))
    kernels = select_efficiency(gpu)
    roofline = Roofline(shape, gpu, tensor, machine.select_link(tensor), kernels)
    return time_passes(roofline.to_timing(), shape, name, tensor)


def time_passes(timing: EngineTiming, shape: ModelShape, name: str, tensor: int) -> Passes:
    """As the planner uses them, with the host's time to start a prompt's kernels."""
    launch = host_launch.select_host_launch(shape, find_gpu(name))
    bound = host_launch.bound_prompts(timing, shape, tensor, launch)
    return {
        "prefill": [bound.predict_prefill_ms([tokens]) for tokens in PROMPTS],
        "decode": [bound.predict_decode_ms(*each) for each in BATCHES],
    }


def iter_errors(gpu: str, relative: str) -> Iterator[tuple[tuple[str, str], float, float]]:
    """((kind of model, phase), error of the roofline, error from the relative) of each pass."""
    for name in MODELS:
        shape = load_shape(name)
        kind = "MoE" if shape.experts else "dense"
        for tensor in TENSORS:
            own, theirs = (time_kernels(shape, each, tensor) for each in (gpu, relative))
            if own is None or theirs is None:
                continue
            rooflines = [time_roofline(shape, each, tensor) for each in (gpu, relative)]
            for phase, measured in own.items():
                rows = zip(
                    measured, theirs[phase], *(each[phase] for each in rooflines), strict=True
                )
                for ms, other, roof, other_roof in rows:
                    yield (kind, phase), roof / ms - 1, other * roof / other_roof / ms - 1


def summarize(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the sizes, median with sign."""
    sizes = sorted(map(abs, errors))
    high = sizes[int(0.9 * (len(sizes) - 1))]
    return f"{statistics.median(sizes):.0%} ({high:.0%}; {statistics.median(errors):+.0%})"


def main() -> None:
    """Print a table."""
    table = Table("GPU", "relative", "models", "phase", "roofline", "relative")
    for gpu, relative in PAIRS:
        groups = defaultdict(list)
        for key, *errors in iter_errors(gpu, relative):
            groups[key].append(errors)
        for (kind, phase), rows in groups.items():
            cells = (summarize(column) for column in zip(*rows, strict=True))
            table.add_row(gpu, relative, kind, phase, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
