"""Shares of the data sheets' rates that kernels reach, by generation of GPUs.

Used by cleave.perf.roofline.roofline. The constants of today's engines were fitted to
aiconfigurator-core 0.12.0's tables of vLLM 0.14 to 0.24 (Apache-2.0; benchmarks/prices), those of
2023 to Vidur's and DistServe's measurements.
"""

from dataclasses import dataclass, replace

from cleave.perf.hardware.gpu import Gpu


@dataclass(frozen=True, slots=True)
class ProductEfficiency:
    """Matrix products: (compute^p + memory^p)^(1/p) and the start of a kernel."""

    compute: float
    """Share of dense matrix throughput in large products."""
    memory: float
    """Share of bandwidth when small products read weights."""
    sharpness: float
    """Exponent p of the norm that joins compute and memory time; infinite is the plain maximum.
    Products near both limits reach neither of them."""
    kernel_ms: float
    """Start and end of one kernel."""


@dataclass(frozen=True, slots=True)
class KernelEfficiency:
    """Shares of the data sheets' rates that kernels reach."""

    source: str
    """The measurements that the constants were fitted to."""
    products: ProductEfficiency
    narrow_products: ProductEfficiency
    """The same of 8-bit products, with the quantisation of their input."""
    experts: ProductEfficiency
    """The routed experts of a layer as one kernel: uneven routing leaves a part of the GPU idle."""
    element_wise: float
    """Share of bandwidth in norms, residuals, rotation, activation."""
    prompt_attention: float
    """Share of dense matrix throughput."""
    decode_attention: float
    """Share of bandwidth when KV is read."""
    small_kernels: int
    """Kernels of a layer besides its products: norms, residuals, rotation, activation, attention.
    Compiled engines fuse some."""
    reduces_in_graphs: bool
    """Whether all-reduces are kernels of a CUDA graph instead of calls of NCCL."""


_HBM3_GB_PER_S = 3000.0
_BLACKWELL_GB_PER_S = 6000.0


def select_efficiency_of_2023(gpu: Gpu) -> KernelEfficiency:
    """Kernels of 2023, not fused, with FlashAttention 2; for comparisons with measurements of that
    time. Vidur: compute on A100 0.752, H100 0.755; memory 0.802, 0.915; sharpness 1.76, 1.71;
    kernels 5.1 us, 4.7 us; element-wise 0.49 to 0.55; prompts of Llama-2-70B on A100. DistServe's
    fits of decode: 0.61 to 0.64."""
    memory = 0.90 if gpu.memory_gbps >= _HBM3_GB_PER_S else 0.80
    products = ProductEfficiency(0.75, memory, 1.75, 0.0046)
    return KernelEfficiency(
        source="Vidur's and DistServe's measurements of 2023",
        products=products,
        narrow_products=products,
        experts=replace(products, kernel_ms=3 * products.kernel_ms),
        element_wise=0.5,
        prompt_attention=0.23,
        decode_attention=0.64,
        small_kernels=9,
        reduces_in_graphs=False,
    )


def is_blackwell_for_servers(gpu: Gpu) -> bool:
    """Whether this is B200, B300, GB200 or GB300, found by its memory bandwidth."""
    return gpu.memory_gbps >= _BLACKWELL_GB_PER_S


def select_efficiency(gpu: Gpu) -> KernelEfficiency:
    """The constants of the GPU's generation, found by its memory bandwidth."""
    if is_blackwell_for_servers(gpu):
        return _BLACKWELL
    return _HOPPER if gpu.memory_gbps >= _HBM3_GB_PER_S else _AMPERE


_SOURCE = "kernels of vLLM {} published 2026 with aiconfigurator-core 0.12.0"
_AMPERE = KernelEfficiency(
    source=_SOURCE.format("0.14 to 0.24"),
    # A100; fits of 8 bits on L40S
    products=ProductEfficiency(0.82, 0.745, 1.65, 0.0054),
    narrow_products=ProductEfficiency(0.61, 0.78, 1.0, 0.0022),
    experts=ProductEfficiency(0.45, 0.96, 1.0, 0.046),
    element_wise=0.8,
    prompt_attention=0.51,
    decode_attention=0.66,
    small_kernels=6,
    reduces_in_graphs=True,
)
_HOPPER = KernelEfficiency(
    source=_SOURCE.format("0.24"),
    # H100, H200
    products=ProductEfficiency(0.81, 0.84, 3.3, 0.0035),
    narrow_products=ProductEfficiency(0.62, 0.86, 1.0, 0.0066),
    experts=ProductEfficiency(0.60, 1.0, 0.86, 0.040),
    element_wise=0.8,
    prompt_attention=0.55,
    decode_attention=0.81,
    small_kernels=6,
    reduces_in_graphs=True,
)
_BLACKWELL = KernelEfficiency(
    source=_SOURCE.format("0.24"),
    # B200, B300, GB200, GB300
    products=ProductEfficiency(0.75, 0.77, 3.4, 0.0032),
    narrow_products=ProductEfficiency(0.475, 0.765, 1.0, 0.0067),
    experts=ProductEfficiency(0.45, 1.0, 0.82, 0.020),
    element_wise=0.8,
    prompt_attention=0.43,
    decode_attention=0.89,
    small_kernels=6,
    reduces_in_graphs=True,
)
