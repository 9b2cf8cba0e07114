"""The roofline as it was before kernel tables: constants of Vidur's and DistServe's data."""

from dataclasses import replace

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline.efficiency import select_efficiency_of_2023
from cleave.perf.roofline.roofline import CUDA_GRAPHS, Roofline


def build_roofline(shape: ModelShape, gpu: Gpu, tensor: int) -> Roofline:
    """What the planner used for models that were not measured."""
    kernels = select_efficiency_of_2023(gpu)
    shape = replace(shape, norms_all_heads=False)
    return Roofline(shape, gpu, tensor, build_node_link(gpu), kernels, CUDA_GRAPHS)
