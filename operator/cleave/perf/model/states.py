"""Layers with a state of constant size in place of a KV cache: linear attention and Mamba.

Read from a config.json for cleave.perf.model.model_shape. Shapes of states are vLLM's
(`model_executor/layers/mamba/mamba_utils.py`): a window of inputs of the convolution, in the type
of the KV cache, and a matrix for each head.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields, ModelConfigError

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The state layers of a model, which are all alike."""

    layers: int
    heads: int
    """Heads that tensor parallelism shards."""
    parameters: int
    """Weights of one layer's projections and convolution."""
    convolution_values: int
    """Values of the inputs that one layer keeps for its convolution."""
    matrix_values: int
    """Values of one layer's state of all heads."""
    matrix_bytes: int
    """Bytes of such a value."""
    inner_size: int
    """Inputs of the projection back to the hidden size."""
    small_parameters: int = 0
    """Of its weights, those that no method quantises: convolutions, and projections that give a
    number for each head."""

    def compute_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one request's state in one layer; `dtype_bytes`: of a value that is cached."""
        return self.convolution_values * dtype_bytes + self.matrix_values * self.matrix_bytes


ReadStates = Callable[[ConfigFields, int, int], StateLayers]
"""The state layers of a model: (config, their number, bytes of an activation value). Raises
ModelConfigError."""


def _read_matrix_bytes(config: ConfigFields, default: int) -> int:
    """vLLM's `--mamba-ssm-cache-dtype auto`: what the config says, else `default`."""
    name = config.get_text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if name is None:
        return default
    if name not in _BYTES_OF_DTYPE:
        raise ModelConfigError(
            f"{config.path}mamba_ssm_dtype is {name[:40]!r}; write one of "
            f"{', '.join(_BYTES_OF_DTYPE)}"
        )
    return _BYTES_OF_DTYPE[name]


def read_gated_delta_net(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
    """Qwen3-Next and Qwen3.5 (Yang et al., "Gated Delta Networks", arXiv 2412.06464)."""
    hidden, kernel = config.get_number("hidden_size"), config.get_number("linear_conv_kernel_dim")
    key_heads = config.get_number("linear_num_key_heads")
    value_heads = config.get_number("linear_num_value_heads")
    key_size = config.get_number("linear_key_head_dim")
    value_size = config.get_number("linear_value_head_dim")
    keys, values = key_heads * key_size, value_heads * value_size
    convolved = 2 * keys + values
    small = hidden * 2 * value_heads + convolved * kernel
    return StateLayers(
        layers=layers,
        heads=key_heads,
        parameters=hidden * (2 * keys + 3 * values) + small,
        convolution_values=(kernel - 1) * convolved,
        matrix_values=value_heads * value_size * key_size,
        matrix_bytes=_read_matrix_bytes(config, dtype_bytes),
        inner_size=values,
        small_parameters=small,
    )


def read_delta_attention(config: ConfigFields, layers: int, _: int) -> StateLayers:
    """Kimi Linear's KDA (Kimi Team, arXiv 2510.26692), whose states vLLM keeps in 32 bits."""
    linear = config.get_object("linear_attn_config")
    if linear is None:
        raise ModelConfigError(f"{config.path}linear_attn_config is missing; add it to the config")
    hidden, kernel = config.get_number("hidden_size"), linear.get_number("short_conv_kernel_size")
    heads, size = linear.get_number("num_heads"), linear.get_number("head_dim")
    width = heads * size
    # Queries, keys, values and output; two gates of rank `size`; a learning rate for each head.
    projections = 4 * hidden * width + 2 * size * (hidden + width)
    small = hidden * heads + 3 * width * kernel
    return StateLayers(
        layers=layers,
        heads=heads,
        parameters=projections + small,
        convolution_values=3 * (kernel - 1) * width,
        matrix_values=width * size,
        matrix_bytes=4,
        inner_size=width,
        small_parameters=small,
    )


def read_mamba2(*, default_bytes: int | None = None, inner_field: str = "") -> ReadStates:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060): Nemotron-H, Granite 4, Falcon-H1. `default_bytes`: of
    a state's value where the file does not say it; None: of an activation. `inner_field`: the width
    of all heads together, for families whose heads may be as wide as that leaves them."""

    def read(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
        hidden = config.get_number("hidden_size")
        heads = config.get_number("mamba_n_heads", "mamba_num_heads")
        inner = _read_inner_size(config, hidden, heads, inner_field)
        state = config.get_number("mamba_d_state", "ssm_state_size")
        groups = config.get_number("mamba_n_groups", "n_groups")
        kernel = config.get_number("mamba_d_conv", "conv_kernel")
        convolved = inner + 2 * groups * state
        return StateLayers(
            layers=layers,
            heads=heads,
            parameters=hidden * (2 * inner + convolved + heads) + convolved * kernel,
            convolution_values=(kernel - 1) * convolved,
            matrix_values=inner * state,
            matrix_bytes=_read_matrix_bytes(config, default_bytes or dtype_bytes),
            inner_size=inner,
            small_parameters=convolved * kernel,
        )

    return read


def _read_inner_size(config: ConfigFields, hidden: int, heads: int, field: str) -> int:
    """Width of all heads of a Mamba-2 layer: `auto` derives that of one from the sum."""
    if not field:
        return heads * config.get_number("mamba_d_head", "mamba_head_dim")
    own = config.get_optional_number(field)
    inner = own or hidden * (config.get_optional_number("mamba_expand") or 2)
    size = config.get("mamba_d_head")
    width = inner // heads if size in ("auto", None) else config.get_number("mamba_d_head")
    if width * heads != inner:
        remedy = f"{heads} heads must have a width of {inner} together"
        raise config.build_error("mamba_d_head", remedy)
    return inner


def read_mamba(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
    """The first Mamba (Gu and Dao, arXiv 2312.00752), in Jamba."""
    hidden, state = config.get_number("hidden_size"), config.get_number("mamba_d_state")
    inner, kernel = hidden * config.get_number("mamba_expand"), config.get_number("mamba_d_conv")
    own_rank = config.get("mamba_dt_rank")
    rank = -(-hidden // 16) if own_rank in ("auto", None) else config.get_number("mamba_dt_rank")
    # To the inner width and its gate, to step and state's inputs, from the step, and back.
    projections = hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
    small = inner * (kernel + state)
    return StateLayers(
        layers=layers,
        heads=inner,
        parameters=projections + small,
        convolution_values=(kernel - 1) * inner,
        matrix_values=inner * state,
        matrix_bytes=_read_matrix_bytes(config, dtype_bytes),
        inner_size=inner,
        small_parameters=small,
    )


def read_convolution(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
    """LFM2's short convolutions, which keep their last inputs only."""
    hidden, kernel = config.get_number("hidden_size"), config.get_number("conv_L_cache")
    return StateLayers(
        layers=layers,
        heads=hidden,
        parameters=4 * hidden * hidden + hidden * kernel,
        convolution_values=(kernel - 1) * hidden,
        matrix_values=0,
        matrix_bytes=dtype_bytes,
        inner_size=hidden,
        small_parameters=hidden * kernel,
    )
