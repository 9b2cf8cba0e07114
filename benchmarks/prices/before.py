"""The roofline as it was before kernel tables: constants of Vidur's and DistServe's data."""

from dataclasses import replace

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.hardware.link import Link, LinkKind, build_node_link
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline.roofline import EngineOverhead, KernelEfficiency, Roofline

KERNELS = KernelEfficiency(
    compute=0.75,
    memory=0.80,
    memory_hbm3=0.90,
    sharpness=1.75,
    kernel_ms=0.0046,
    element_wise=0.5,
    prompt_attention=0.23,
    decode_attention=0.64,
)
OVERHEAD = EngineOverhead("before", 2.0)


class NcclLink(Link):
    """All-reduces of NCCL outside of graphs, as measured by Vidur."""

    def compute_all_reduce_ms(self, size_bytes: float, gpus: int) -> float:
        if gpus == 1 or self.kind is not LinkKind.NVLINK:
            return super().compute_all_reduce_ms(size_bytes, gpus)
        start_us, share = (25.0, 0.75) if self.gb_per_s >= 450 else (45.0, 0.55)
        moved = 2 * (gpus - 1) / gpus * size_bytes
        return start_us / 1e3 + moved / (self.gb_per_s * share * 1e6)


def build_roofline(shape: ModelShape, gpu: Gpu, tensor: int) -> Roofline:
    """What the planner used for models that were not measured."""
    node = build_node_link(gpu)
    link = NcclLink(node.kind, node.gb_per_s, node.latency_us)
    return Roofline(shape, replace(gpu), tensor, link, OVERHEAD, KERNELS)
