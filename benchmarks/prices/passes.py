"""Errors of whole passes against sums of the source's rows, before and after."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import before
import reference

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.kernels import composition, tables
from cleave.perf.model import model_shape
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import Roofline

GPUS = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB")
DENSE = {"llama-3.1-8b": (1, 2, 4, 8), "llama-3.1-70b": (2, 4, 8), "qwen3-32b": (1, 2, 4, 8)}
SPARSE = {"gpt-oss-120b": (1, 2, 4, 8), "qwen3-235b-a22b": (4, 8), "mixtral-8x7b": (2, 4, 8)}
PROMPTS = (512, 1536, 2048, 4096, 6144, 8192, 16384, 32768)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (512, 2048, 4096, 8192)
MOST_CONTEXT = 1 << 20


@dataclass(frozen=True)
class PassError:
    """One pass of one model, predicted three ways and referred to the sum of measured kernels."""

    gpu: str
    model: str
    tensor: int
    phase: str
    size: tuple[int, ...]
    tables: float
    """Relative error; 0.1 is 10 % too long."""
    roofline: float
    before: float

    @property
    def is_sparse(self) -> bool:
        return self.model in SPARSE


def iter_errors(root: Path, gpus: tuple[str, ...] = GPUS) -> Iterator[PassError]:
    """Every model, tensor parallel size and pass that the source has kernels for."""
    for name in gpus:
        gpu = find_gpu(name)
        found, rows = tables.find_tables(gpu), reference.SourceTables(root, name)
        assert found is not None
        for model, sizes in {**DENSE, **SPARSE}.items():
            shape = model_shape.load_shape(model)
            for tensor in sizes:
                built = composition.build_operators(shape, found, tensor)
                if built is None:
                    continue
                timings = (
                    operator_fit.to_timing(built, tensor),
                    Roofline(
                        shape, gpu, tensor, build_node_link(gpu), select_efficiency(gpu)
                    ).to_timing(),
                    before.build_roofline(shape, gpu, tensor).to_timing(),
                )
                summed = reference.ReferencePass(rows, found, shape, tensor)
                for tokens in PROMPTS:
                    ms = summed.predict_prefill_ms(tokens)
                    shares = [each.predict_prefill_ms([tokens]) / ms - 1 for each in timings]
                    yield PassError(name, model, tensor, "prefill", (tokens,), *shares)
                for batch in BATCHES:
                    for context in CONTEXTS:
                        if batch * context > MOST_CONTEXT:
                            continue
                        ms = summed.predict_decode_ms(batch, context)
                        shares = [t.predict_decode_ms(batch, batch * context) for t in timings]
                        shares = [each / ms - 1 for each in shares]
                        size = (batch, context)
                        yield PassError(name, model, tensor, "decode", size, *shares)
