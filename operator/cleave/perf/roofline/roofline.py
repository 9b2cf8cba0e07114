"""Iteration times computed from FLOPs, bytes and messages, for models without measurements.

Called by cleave.perf.estimator. Each operator takes about the maximum of its compute time and its
memory time, plus the start of its kernels (Vidur's operators, DistServe's simulator in section
4.1). What is hard: the shares of the data sheets' rates that real kernels reach. They were
calibrated once, on Vidur's operator profiles and DistServe's published fits: see
`KERNEL_EFFICIENCY` and `EngineOverhead`; benchmarks/calibration prints their errors on each source.
"""

from dataclasses import dataclass

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.hardware.link import Link
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline import operators
from cleave.perf.roofline.operators import MatrixProduct
from cleave.perf.timing import EngineTiming

_STEP = 32
_LARGEST_PROMPT = 8192
"""Iterations are tabulated up to this many prompt tokens and extrapolated linearly beyond."""
_LARGEST_BATCH = 512
_ALL_REDUCES_PER_LAYER = 2
_ATTENTION_KERNELS = 3


@dataclass(frozen=True, slots=True)
class KernelEfficiency:
    """Shares of the data sheets' rates that kernels reach."""

    compute: float = 0.75
    """Share of dense matrix throughput in large products (Vidur: A100 0.752, H100 0.755)."""
    memory: float = 0.80
    """Share of bandwidth when small products read weights (Vidur: A100 0.802)."""
    memory_hbm3: float = 0.90
    """The same with HBM3 or newer memory (Vidur: H100 0.915)."""
    sharpness: float = 1.75
    """Exponent of the norm that joins compute and memory time; infinite is the plain maximum.
    Products near both limits reach neither of them (Vidur: A100 1.76, H100 1.71)."""
    kernel_ms: float = 0.0046
    """Start and end of one kernel (Vidur: A100 5.1 us, H100 4.7 us)."""
    element_wise: float = 0.5
    """Share of bandwidth in norms, residuals, rotation, activation (Vidur: 0.49 to 0.55)."""
    prompt_attention: float = 0.23
    """Share of dense matrix throughput (Vidur: Llama-2-70B on A100, chunks of 1,024 or more)."""
    decode_attention: float = 0.64
    """Share of bandwidth when KV is read (DistServe's fits: 0.61 to 0.64; Vidur 0.54 to 0.69)."""


KERNEL_EFFICIENCY = KernelEfficiency()
_HBM3_GB_PER_S = 3000.0


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """The overhead of an engine besides its kernels."""

    name: str
    iteration_ms: float
    """Scheduling, sampling and sending per iteration, during which the GPU is idle."""
    host_layer_ms: float = 0.0
    """Time of the host to start one layer's kernels, a lower bound of the layer; 0: CUDA graphs."""


CUDA_GRAPHS = EngineOverhead("kernels started by graphs", 2.0)
"""DistServe's own engine; also assumed for all engines with CUDA graphs."""
VLLM_2023 = EngineOverhead("vLLM of 2023", 5.0, 0.50)
"""Before CUDA graphs: with small shards the host was slower than the GPU."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model, tensor parallel over GPUs of one type, without pipeline stages."""

    shape: ModelShape
    gpu: Gpu
    tensor: int
    link: Link
    """Between the GPUs of the instance."""
    engine: EngineOverhead = CUDA_GRAPHS
    kernels: KernelEfficiency = KERNEL_EFFICIENCY

    def to_timing(self) -> EngineTiming:
        """Iteration times with one stage; cleave.perf.pipeline derives more stages from it."""
        attention = operators.build_attention(self.shape, self.tensor)
        read_bytes_per_ms = self._nominal_bytes_per_ms * self.kernels.decode_attention
        context_ms = max(
            attention.decode_bytes_per_context_token / read_bytes_per_ms,
            attention.decode_flops_per_context_token / self._compute_flops_per_ms(is_8_bit=False),
        )
        count = _LARGEST_PROMPT // _STEP + 1
        return EngineTiming(
            prompt_step=float(_STEP),
            prompt_ms=tuple(self.predict_rows_ms(i * _STEP, 1) for i in range(count)),
            prompt_square_ms=attention.prompt_flops_per_square
            / (self._compute_peak_flops_per_ms(is_8_bit=False) * self.kernels.prompt_attention),
            decode_ms=tuple(self.predict_rows_ms(n, n) for n in range(_LARGEST_BATCH + 1)),
            decode_context_ms=(context_ms,),
        )

    def predict_rows_ms(self, rows: float, heads: float) -> float:
        """ms of an iteration with `rows` rows, `heads` of them through the LM head, no contexts."""
        shape, kernels = self.shape, self.kernels
        products = [
            *operators.iter_matrix_products(shape, self.tensor, rows),
            operators.build_lm_head(shape, self.tensor, heads),
        ]
        gpu_ms = sum(product.count * self._predict_product_ms(product) for product in products)
        moved = rows * operators.compute_element_wise_bytes(shape, self.tensor)
        gpu_ms += moved / (self._nominal_bytes_per_ms * kernels.element_wise)
        small = operators.ELEMENT_WISE_KERNELS + _ATTENTION_KERNELS
        gpu_ms += shape.num_layers * small * kernels.kernel_ms
        size_bytes = operators.compute_all_reduce_bytes(shape, rows)
        reduce_ms = self.link.compute_all_reduce_ms(size_bytes, self.tensor)
        gpu_ms += _ALL_REDUCES_PER_LAYER * shape.num_layers * reduce_ms
        return self.engine.iteration_ms + max(gpu_ms, shape.num_layers * self.engine.host_layer_ms)

    def _predict_product_ms(self, product: MatrixProduct) -> float:
        is_8_bit = product.name != "lm_head" and self._is_8_bit
        compute_ms = product.flops / self._compute_flops_per_ms(is_8_bit)
        memory_ms = product.size_bytes / self._bytes_per_ms
        power = self.kernels.sharpness
        joined: float = (compute_ms**power + memory_ms**power) ** (1 / power)
        return product.kernels * self.kernels.kernel_ms + joined

    @property
    def _is_8_bit(self) -> bool:
        quantization = self.shape.quantization
        return quantization is not None and quantization.is_8_bit_compute

    def _compute_flops_per_ms(self, is_8_bit: bool) -> float:
        return self._compute_peak_flops_per_ms(is_8_bit) * self.kernels.compute

    def _compute_peak_flops_per_ms(self, is_8_bit: bool) -> float:
        return self.gpu.get_tflops(is_8_bit) * 1e9

    @property
    def _nominal_bytes_per_ms(self) -> float:
        return self.gpu.memory_gbps * 1e6

    @property
    def _bytes_per_ms(self) -> float:
        is_hbm3 = self.gpu.memory_gbps >= _HBM3_GB_PER_S
        share = self.kernels.memory_hbm3 if is_hbm3 else self.kernels.memory
        return self._nominal_bytes_per_ms * share
