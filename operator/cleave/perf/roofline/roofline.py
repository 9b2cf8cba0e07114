"""Iteration times computed from FLOPs, bytes and messages, for models without measurements.

Called by cleave.perf.estimator. Each operator takes about the maximum of its compute time and its
memory time, plus the start of its kernels (Vidur's operators, DistServe's simulator in section
4.1). What is hard: the shares of the data sheets' rates that real kernels reach: see
cleave.perf.roofline.efficiency and `EngineOverhead`. benchmarks/prices prints the errors of today's
constants, benchmarks/calibration those of the constants of 2023.
"""

from dataclasses import dataclass

from cleave.perf.hardware.expert_group import ExpertGroup
from cleave.perf.hardware.gpu import Gpu
from cleave.perf.hardware.link import Link
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline import operators
from cleave.perf.roofline.efficiency import KernelEfficiency, ProductEfficiency
from cleave.perf.roofline.operators import MatrixProduct
from cleave.perf.timing import EngineTiming

_STEP = 32
_LARGEST_PROMPT = 8192
"""Iterations are tabulated up to this many prompt tokens and extrapolated linearly beyond."""
_LARGEST_BATCH = 512
_ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """The overhead of an engine besides its kernels."""

    name: str
    iteration_ms: float
    """Scheduling, sampling and sending per iteration, during which the GPU is idle."""
    host_layer_ms: float = 0.0
    """Time of the host to start one layer's kernels, a lower bound of the layer; 0: CUDA graphs."""
    front_end_ms: float = 0.0
    """Latency of a request outside of iterations: HTTP, tokenisation, the way to the scheduler."""
    schedules_ahead: bool = False
    """See `EngineTiming.schedules_ahead`."""


CUDA_GRAPHS = EngineOverhead("kernels started by graphs", 2.0)
"""DistServe's own engine."""
VLLM = EngineOverhead(
    "vLLM with asynchronous scheduling", 0.3, front_end_ms=17.0, schedules_ahead=True
)
"""The default on GPUs since 0.14, with KV connectors, too. vLLM prepares an iteration while the one
before runs. What is left, the start of the graph and of some small kernels, is an assumption:
benchmarks/prices compares the sum with published runs. The front end is fitted there to runs on
H100."""
VLLM_2023 = EngineOverhead("vLLM of 2023", 5.0, 0.50)
"""Before CUDA graphs: with small shards the host was slower than the GPU."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model, tensor parallel over GPUs of one type, without pipeline stages; or one of the
    data-parallel ranks of an instance, while all have equal rows."""

    shape: ModelShape
    gpu: Gpu
    tensor: int
    link: Link
    """Between the GPUs of the instance."""
    kernels: KernelEfficiency
    engine: EngineOverhead = VLLM
    group: ExpertGroup | None = None
    """How experts are shared; None: as slices over the GPUs of the instance."""

    def to_timing(self) -> EngineTiming:
        """Iteration times with one stage; cleave.perf.pipeline derives more stages from it."""
        attention = operators.build_attention(self.shape, self.tensor)
        read_bytes_per_ms = self._nominal_bytes_per_ms * self.kernels.decode_attention
        context_ms = max(
            attention.decode_bytes_per_context_token / read_bytes_per_ms,
            attention.decode_flops_per_context_token
            / self._compute_peak_flops_per_ms(is_8_bit=False)
            * self.kernels.products.compute,
        )
        # A state is read and written once for each token, and full windows are read.
        states = self.shape.compute_state_bytes(self.tensor)
        state_ms = (states + self.shape.compute_bounded_bytes(self.tensor)) / read_bytes_per_ms
        count = _LARGEST_PROMPT // _STEP + 1
        return EngineTiming(
            prompt_step=float(_STEP),
            prompt_ms=tuple(self.predict_rows_ms(i * _STEP, 1) for i in range(count)),
            prompt_square_ms=attention.prompt_flops_per_square
            / (self._compute_peak_flops_per_ms(is_8_bit=False) * self.kernels.prompt_attention),
            decode_ms=tuple(
                self.predict_rows_ms(n, n) + n * state_ms for n in range(_LARGEST_BATCH + 1)
            ),
            decode_context_ms=(context_ms,),
            schedules_ahead=self.engine.schedules_ahead,
        )

    def predict_rows_ms(self, rows: float, heads: float) -> float:
        """ms of an iteration with `rows` rows, `heads` of them through the LM head, no contexts."""
        shape, kernels = self.shape, self.kernels
        products = [
            *operators.iter_matrix_products(shape, self.tensor, rows, self.group),
            operators.build_lm_head(shape, self.tensor, heads),
        ]
        gpu_ms = sum(product.count * self._predict_product_ms(product) for product in products)
        moved = rows * operators.compute_element_wise_bytes(shape, self.tensor)
        gpu_ms += moved / (self._nominal_bytes_per_ms * kernels.element_wise)
        gpu_ms += shape.num_layers * kernels.small_kernels * kernels.products.kernel_ms
        size_bytes = operators.compute_all_reduce_bytes(shape, rows)
        reduce_ms = self.link.compute_all_reduce_ms(
            size_bytes, self.tensor, in_graphs=kernels.reduces_in_graphs
        )
        gpu_ms += _ALL_REDUCES_PER_LAYER * shape.num_layers * reduce_ms
        if shape.norms_all_heads:
            gpu_ms += shape.num_layers * self.link.compute_all_reduce_ms(
                rows * operators.NORM_BYTES, self.tensor, in_graphs=kernels.reduces_in_graphs
            )
        if self.group and shape.experts:
            per_token = shape.experts.per_token
            gpu_ms += shape.expert_layers * self.group.compute_exchange_ms(
                rows, shape.hidden_size, per_token
            )
        return self.engine.iteration_ms + max(gpu_ms, shape.num_layers * self.engine.host_layer_ms)

    def _predict_product_ms(self, product: MatrixProduct) -> float:
        is_8_bit = product.name != "lm_head" and self._is_8_bit
        kernels = self._select_products(product.name, is_8_bit)
        compute_ms = product.flops / (self._compute_peak_flops_per_ms(is_8_bit) * kernels.compute)
        memory_ms = product.size_bytes / (self._nominal_bytes_per_ms * kernels.memory)
        power = kernels.sharpness
        joined: float = (compute_ms**power + memory_ms**power) ** (1 / power)
        return kernels.kernel_ms + joined

    def _select_products(self, name: str, is_8_bit: bool) -> ProductEfficiency:
        if name == operators.EXPERTS:
            return self.kernels.experts
        return self.kernels.narrow_products if is_8_bit else self.kernels.products

    @property
    def _is_8_bit(self) -> bool:
        quantization = self.shape.quantization
        return quantization is not None and quantization.is_8_bit_compute

    def _compute_peak_flops_per_ms(self, is_8_bit: bool) -> float:
        return self.gpu.get_tflops(is_8_bit) * 1e9

    @property
    def _nominal_bytes_per_ms(self) -> float:
        return self.gpu.memory_gbps * 1e6
