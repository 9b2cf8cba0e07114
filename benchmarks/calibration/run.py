"""How wrong Cleave's latency models are, source by source and phase by phase.

Run from the root: `.venv/bin/python benchmarks/calibration/run.py --data FOLDER`. DistServe's fits
are in Cleave itself, Splitwise's runs in tests/support; the folder adds Vidur's operator profiles.
README.md says how to read the table.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import vidur
from rich.console import Console
from rich.table import Table

from cleave.perf import named_profiles
from cleave.perf.hardware import gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.model import model_shape
from cleave.perf.profile import curve, iteration_fit, operator_fit
from cleave.perf.profile.profile import MeasuredProfile
from cleave.perf.published import aladdin, distserve
from cleave.perf.roofline import operators, roofline
from cleave.perf.roofline.efficiency import select_efficiency_of_2023
from cleave.perf.roofline.roofline import EngineOverhead, Roofline
from cleave.perf.timing import EngineTiming

sys.path.append(str(Path(__file__).parents[2]))

from tests.support import splitwise_runs

PROMPTS = ((128,), (256,), (512,), (1024,), (2048,), (256,) * 4, (512,) * 4)
BATCHES = tuple(
    (batch, batch * mean) for batch in (1, 4, 16, 32, 64, 128) for mean in (128, 512, 1024)
)
LONGEST_WHOLE_PASS = 2048
"""Splitwise's vLLM shows a kink beyond, which no operator explains."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
ELEMENT_WISE_KERNELS = 6
"""Of one layer: two norms, two residuals, rotation, activation."""
HOSTS = {"A100-SXM-80GB": 0.50, "H100-SXM-80GB": 0.31}
"""ms that the host of Splitwise's machines needs for a layer."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; errors are means of |predicted / measured - 1|."""

    model: str
    source: str
    prefill: float | None
    decode: float | None
    note: str = ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with Vidur's profiles")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lines = [*interpolation(), *affine(), *roofline_of_distserve(), *roofline_of_splitwise()]
    if (folder := args.data / "vidur").is_dir():
        lines += [*products(folder), element_wise(folder), operator_passes(folder)]
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)


def interpolation() -> Iterator[Line]:
    """Splitwise's runs, each point from the others."""
    for key in splitwise_runs.list_profiles():
        errors = iteration_fit.compute_validation_errors(splitwise_runs.find_profile(*key))
        yield Line(
            "interpolation", f"splitwise {label(*key)}", errors.prefill, errors.decode, "held out"
        )


def affine() -> Iterator[Line]:
    """Aladdin's Eq. 2 and 3 on the same runs, in sample: what straight lines can do at best."""
    for key in splitwise_runs.list_profiles():
        found = splitwise_runs.find_profile(*key)
        times = aladdin.IterationTimeModel()
        for point in found.prefill:
            times.add_prefill(point.prompts * point.tokens, point.ms)
        for point in found.decode:
            times.decode.add((point.context_tokens, point.batch, 1.0), point.ms)
        timing = times.solve().to_timing()
        yield line("Aladdin Eq. 2-3", f"splitwise {label(*key)}", timing, found, "in sample")


def roofline_of_distserve() -> Iterator[Line]:
    """DistServe's own engine; both vLLMs of the time are slower than their kernels."""
    for name, fit in distserve.FITS.items():
        engine, model_name, size = name.split("/")
        engine = roofline.CUDA_GRAPHS if engine == "distserve" else roofline.VLLM_2023
        timing = computed(model_name, "A100-SXM-80GB", int(size.removeprefix("tp")), engine)
        published = named_profiles.to_timing(fit)
        yield Line(
            "roofline",
            name,
            curve.compute_mean_error(
                (timing.predict_prefill_ms(p), published.predict_prefill_ms(p)) for p in PROMPTS
            ),
            curve.compute_mean_error(
                (timing.predict_decode_ms(*b), published.predict_decode_ms(*b)) for b in BATCHES
            ),
            engine.name,
        )


def roofline_of_splitwise() -> Iterator[Line]:
    for name, device, tensor in splitwise_runs.list_profiles():
        found = splitwise_runs.find_profile(name, device, tensor)
        engine = replace(roofline.VLLM_2023, host_layer_ms=HOSTS[device])
        timing = computed(name, device, tensor, engine)
        whole = [p for p in found.prefill if p.prompts * p.tokens <= LONGEST_WHOLE_PASS]
        shown = f"splitwise {label(name, device, tensor)}"
        yield line("roofline", shown, timing, found, f"{engine.name}, all passes")
        yield line(
            "roofline", shown, timing, replace(found, prefill=tuple(whole)), "to 2,048 tokens"
        )


def products(folder: Path) -> Iterator[Line]:
    """Matrix products against Vidur's; also with constants fitted on the other GPU alone."""
    by_gpu = {name: list(samples(folder, name)) for name in vidur.GPUS.values()}
    for name, found in by_gpu.items():
        other = next(each for each in by_gpu if each != name)
        held_out = curve.compute_mean_error(predicted(found, refit(by_gpu[other])))
        in_use = curve.compute_mean_error(predicted(found, of_gpu(name)))
        yield Line("matrix products", f"vidur {name}", in_use, None, "constants in use")
        yield Line("matrix products", f"vidur {name}", held_out, None, f"fitted on {other}")


def element_wise(folder: Path) -> Line:
    def pairs() -> Iterator[tuple[float, float]]:
        for layer in vidur.layers(folder):
            if layer.rows >= 512:
                shape, device = model_shape.load_shape(layer.model), gpu.find_gpu(layer.gpu)
                moved = layer.rows * operators.compute_element_wise_bytes(shape, layer.tensor)
                efficiency = select_efficiency_of_2023(device)
                rate = device.memory_gbps * 1e6 * efficiency.element_wise
                kernels = ELEMENT_WISE_KERNELS * efficiency.products.kernel_ms
                yield moved / shape.num_layers / rate + kernels, layer.element_wise_ms

    return Line("element-wise", "vidur, 512 rows and more", curve.compute_mean_error(pairs()), None)


def operator_passes(folder: Path) -> Line:
    """Passes from Vidur's operators against Splitwise's of the same model, GPU and size."""
    found = vidur.operators_of_llama_70b(folder)
    timing = operator_fit.to_timing(replace(found, pass_overhead_ms=5.0), 2)
    target = splitwise_runs.find_profile("llama-2-70b", "A100-SXM-80GB", 2)
    return line("operators summed", "vidur -> splitwise llama-2-70b A100 tp2", timing, target)


def computed(name: str, device: str, tensor: int, engine: EngineOverhead) -> EngineTiming:
    found = gpu.find_gpu(device)
    return Roofline(
        model_shape.load_shape(name),
        found,
        tensor,
        build_node_link(found),
        select_efficiency_of_2023(found),
        engine,
    ).to_timing()


def line(
    kind: str, source: str, timing: EngineTiming, found: MeasuredProfile, note: str = ""
) -> Line:
    return Line(
        kind,
        source,
        curve.compute_mean_error(
            (timing.predict_prefill_ms([p.tokens] * p.prompts), p.ms) for p in found.prefill
        ),
        curve.compute_mean_error(
            (timing.predict_decode_ms(p.batch, p.context_tokens), p.ms) for p in found.decode
        ),
        note,
    )


Sample = tuple[float, float, float]
"""Nominal compute and memory time, measured time; milliseconds."""
Constants = tuple[float, float, float, float]
"""Compute, memory, kernel ms, sharpness."""


def samples(folder: Path, name: str) -> Iterator[Sample]:
    for layer in vidur.layers(folder):
        if layer.gpu != name or layer.rows not in ROWS:
            continue
        device = gpu.find_gpu(name)
        for product in operators.iter_matrix_products(
            model_shape.load_shape(layer.model), layer.tensor, layer.rows
        ):
            compute_ms = product.flops / (device.dense_tflops * 1e9)
            memory_ms = product.size_bytes / (device.memory_gbps * 1e6)
            yield compute_ms, memory_ms, layer.products[product.name]


def of_gpu(name: str) -> Constants:
    products = select_efficiency_of_2023(gpu.find_gpu(name)).products
    return products.compute, products.memory, products.kernel_ms, products.sharpness


def predicted(found: Iterable[Sample], constants: Constants) -> Iterator[tuple[float, float]]:
    compute, memory, kernel_ms, power = constants
    for compute_ms, memory_ms, ms in found:
        joined = ((compute_ms / compute) ** power + (memory_ms / memory) ** power) ** (1 / power)
        yield kernel_ms + joined, ms


def refit(found: list[Sample]) -> Constants:
    """Least mean error, by steps along each constant that shrink when none helps."""
    best, factor = list(of_gpu("A100-SXM-80GB")), 1.2

    def score(c: list[float]) -> float:
        return curve.compute_mean_error(predicted(found, tuple(c)))

    least = score(best)
    while factor > 1.005:
        moves = [
            [value * change if k == i else value for k, value in enumerate(best)]
            for i in range(len(best))
            for change in (factor, 1 / factor)
        ]
        error, move = min((score(each), each) for each in moves)
        if error < least:
            least, best = error, move
        else:
            factor = factor**0.5
    return tuple(best)


def label(name: str, device: str, tensor: int) -> str:
    return f"{name} {device.partition('-')[0]} tp{tensor}"


def show(lines: Iterable[Line]) -> None:
    table = Table(title="Mean absolute percentage error")
    for column in ("model", "source", "prefill", "decode", "note"):
        table.add_column(column, justify="right" if column in ("prefill", "decode") else "left")
    for each in lines:
        table.add_row(
            each.model, each.source, percent(each.prefill), percent(each.decode), each.note
        )
    Console(width=120).print(table)


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    main()
