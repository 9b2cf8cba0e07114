"""The host's time to start the kernels of a prompt where no CUDA graph starts them.

Called by cleave.perf.estimator for times from kernels and the roofline, and by benchmarks/prices.
vLLM replays graphs for iterations up to a number of tokens. In larger ones the host starts every
operator of every layer, so that an iteration takes at least that long, however short its kernels.
What is hard: FlashInfer chooses among its kernels in Python at every call, which takes longer than
most products on Blackwell.
"""

from dataclasses import dataclass, replace

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline import operators
from cleave.perf.roofline.efficiency import is_blackwell_for_servers
from cleave.perf.roofline.roofline import VLLM
from cleave.perf.timing import EngineTiming

LAUNCH_MS = 0.02
"""Of one of vLLM's operators: its all-reduce of small messages outside of graphs, the same over 2,
4 and 8 GPUs on the hosts of H100, H200 and B200 (aiconfigurator-core 0.12.0,
`vLLM_custom_eager`)."""
FLASHINFER_FP8_MS = 0.2
FLASHINFER_FP4_MS = 0.049
"""Of a product by FlashInfer with the backends that vLLM asks for, `auto` and one by name. Measured
on Blackwell with products of 16 bits, which take the same path (flashinfer-ai/flashinfer, pull
request 4674 of August 2026, Apache-2.0); vLLM reports 0.25 ms for `auto` (pull request 47898)."""
_OPERATORS = 5
"""Of one layer besides its products: two norms, rotation with the write to the KV cache, attention,
activation."""
_ALL_REDUCES = 2


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """How an engine starts a prompt's kernels."""

    product_ms: float
    """Of one matrix product."""
    graph_tokens: int
    """Largest iteration that is replayed as a CUDA graph."""


def select_host_launch(shape: ModelShape, gpu: Gpu) -> HostLaunch:
    """As vLLM 0.32 does by default for this model. With ModelOpt's 8 bits a whole tensor has one
    scale, and only such products go to FlashInfer."""
    if not is_blackwell_for_servers(gpu):
        return HostLaunch(LAUNCH_MS, graph_tokens=512)
    product_ms, quantization = LAUNCH_MS, shape.quantization
    if quantization is not None and quantization.is_4_bit_compute:
        product_ms = FLASHINFER_FP4_MS
    elif quantization is not None and quantization.method == "modelopt":
        product_ms = FLASHINFER_FP8_MS
    return HostLaunch(product_ms, graph_tokens=1024)


def bound_prompts(
    timing: EngineTiming, shape: ModelShape, tensor: int, launch: HostLaunch
) -> EngineTiming:
    """`timing`, which has one stage, with iterations of prompts beyond the graphs at least as long
    as the host takes to start them."""
    least_ms = VLLM.iteration_ms + compute_host_ms(shape, tensor, launch)
    prompt_ms = tuple(
        max(ms, least_ms) if i * timing.prompt_step > launch.graph_tokens else ms
        for i, ms in enumerate(timing.prompt_ms)
    )
    return replace(timing, prompt_ms=prompt_ms)


def compute_host_ms(shape: ModelShape, tensor: int, launch: HostLaunch) -> float:
    """ms of the host to start all layers on each of `tensor` GPUs. Experts count as one operator,
    the projections of latent attention as two products."""
    products = {each.name: each.count for each in operators.iter_matrix_products(shape, tensor, 1)}
    experts = products.pop(operators.EXPERTS, 0)
    reduces = _ALL_REDUCES if tensor > 1 else 0
    others = experts + shape.num_layers * (_OPERATORS + reduces)
    return sum(products.values()) * launch.product_ms + others * LAUNCH_MS
