"""Layers with a state of constant size in place of a KV cache: linear attention and Mamba.

Read from a config.json for cleave.perf.model.model_shape. Shapes of states are vLLM's
(`model_executor/layers/mamba/mamba_utils.py`): a window of inputs of the convolution, in the type
of the KV cache, and a matrix for each head.
"""

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

    def compute_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one request's state in one layer; `dtype_bytes`: of a value that is cached."""
        return self.convolution_values * dtype_bytes + self.matrix_values * self.matrix_bytes


def read_state_layers(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers | None:
    """The `layers` state layers of a model, with activations of `dtype_bytes`; None: there are
    none. Raises ModelConfigError."""
    if not layers:
        return None
    if config.values.get("linear_num_value_heads") is not None:
        return _read_gated_delta_net(config, layers, dtype_bytes)
    if (linear := config.get_object("linear_attn_config")) is not None:
        return _read_delta_attention(config, linear, layers)
    if config.get_optional_number("mamba_d_state", "ssm_state_size") is not None:
        return _read_mamba2(config, layers, dtype_bytes)
    raise ModelConfigError(
        f"{config.path}linear_num_value_heads is missing, as are linear_attn_config and "
        "mamba_d_state (or ssm_state_size): one of them describes the state layers"
    )


def _read_matrix_bytes(config: ConfigFields, dtype_bytes: int) -> int:
    """vLLM's `--mamba-ssm-cache-dtype auto`: what the config says, else the model's type."""
    name = config.get_text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if name is None:
        return dtype_bytes
    if name not in _BYTES_OF_DTYPE:
        raise ModelConfigError(
            f"{config.path}mamba_ssm_dtype is {name[:40]!r}; write one of "
            f"{', '.join(_BYTES_OF_DTYPE)}"
        )
    return _BYTES_OF_DTYPE[name]


def _read_gated_delta_net(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
    """Qwen3-Next and Qwen3.5 (Yang et al., "Gated Delta Networks", arXiv 2412.06464)."""
    hidden, kernel = config.get_number("hidden_size"), config.get_number("linear_conv_kernel_dim")
    key_heads = config.get_number("linear_num_key_heads")
    value_heads = config.get_number("linear_num_value_heads")
    key_size = config.get_number("linear_key_head_dim")
    value_size = config.get_number("linear_value_head_dim")
    keys, values = key_heads * key_size, value_heads * value_size
    convolved = 2 * keys + values
    projections = hidden * (2 * keys + 3 * values + 2 * value_heads)
    return StateLayers(
        layers=layers,
        heads=key_heads,
        parameters=projections + convolved * kernel,
        convolution_values=(kernel - 1) * convolved,
        matrix_values=value_heads * value_size * key_size,
        matrix_bytes=_read_matrix_bytes(config, dtype_bytes),
    )


def _read_delta_attention(config: ConfigFields, linear: ConfigFields, layers: int) -> StateLayers:
    """Kimi Linear's KDA (Kimi Team, arXiv 2510.26692), whose states vLLM keeps in 32 bits."""
    hidden, kernel = config.get_number("hidden_size"), linear.get_number("short_conv_kernel_size")
    heads, size = linear.get_number("num_heads"), linear.get_number("head_dim")
    width = heads * size
    # Queries, keys, values and output; two gates of rank `size`; a learning rate for each head.
    projections = 4 * hidden * width + 2 * size * (hidden + width) + hidden * heads
    return StateLayers(
        layers=layers,
        heads=heads,
        parameters=projections + 3 * width * kernel,
        convolution_values=3 * (kernel - 1) * width,
        matrix_values=width * size,
        matrix_bytes=4,
    )


def _read_mamba2(config: ConfigFields, layers: int, dtype_bytes: int) -> StateLayers:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060): Nemotron-H, Granite 4."""
    hidden = config.get_number("hidden_size")
    heads = config.get_number("mamba_n_heads", "mamba_num_heads")
    inner = heads * config.get_number("mamba_d_head", "mamba_head_dim")
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
        matrix_bytes=_read_matrix_bytes(config, dtype_bytes),
    )
