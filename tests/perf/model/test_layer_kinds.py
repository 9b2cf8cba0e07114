"""Which layers keep what, in each of the ways in which configs say it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape, UnknownModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}
PER_LAYER = 2 * 4 * 64 * 2
DELTA_NET = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3_5_text", **DELTA_NET}
KDA = {"num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}
KIMI: dict[str, Any] = {**LLAMA, "model_type": "kimi_linear", "linear_attn_config": KDA}
MAMBA = {
    "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2,
    "conv_kernel": 4,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {**LLAMA, "model_type": "nemotron_h", **MAMBA}
GRANITE: dict[str, Any] = {
    **LLAMA, "model_type": "granitemoehybrid", "mamba_n_heads": 32, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "num_local_experts": 0,
}  # fmt: skip
ONE_FULL = ["linear_attention"] * 3 + ["full_attention"]


def build(config: dict[str, Any], **more: Any) -> ModelShape:
    return model_shape.from_config("m", {**config, **more})


def refuse(config: dict[str, Any], **more: Any) -> str:
    with pytest.raises(UnknownModelError) as raised:
        build(config, **more)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (QWEN, {"layer_types": ONE_FULL * 2}),
        (QWEN, {"full_attention_interval": 4}),
        (QWEN, {}),
        (GRANITE, {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2}),
        (KIMI, {}),
        (NEMOTRON, {"hybrid_override_pattern": "MMM*MMM*"}),
    ],
)
def test_state_layers_keep_no_kv_and_a_state_that_does_not_grow(
    config: dict[str, Any], more: dict[str, Any]
) -> None:
    shape = build(config, **more)
    assert shape.attention_layers == 2
    assert shape.kv_bytes_per_token == 2 * PER_LAYER
    state = shape.compute_state_bytes()
    assert state > 0
    short, long = (shape.compute_context_bytes_on_gpu(tokens) for tokens in (100, 10_100))
    assert (short, long - short) == (state + 200 * PER_LAYER, 20_000 * PER_LAYER)
    assert shape.compute_state_bytes(4) == state // 4


def test_layers_of_nemotron_are_one_thing_each() -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    config = {**NEMOTRON, **experts}
    shape = build(config, hybrid_override_pattern="ME*MEM-E")
    assert (shape.attention_layers, shape.states and shape.states.layers) == (1, 3)
    assert (shape.expert_layers, shape.dense_mlp_layers) == (3, 1)
    assert not shape.has_gated_mlp
    named = ["mamba", "moe", "attention", "mamba", "moe", "mamba", "mlp", "moe"]
    del config["num_hidden_layers"]
    assert build(config, layers_block_type=named) == shape


def test_falcon_has_attention_and_a_state_in_each_layer() -> None:
    mamba = {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64}
    shape = build({**LLAMA, "model_type": "falcon_h1", **mamba})
    assert shape.attention_layers == 8
    assert shape.states is not None
    assert shape.states.layers == 8
    assert shape.kv_bytes_per_token == 8 * PER_LAYER


WINDOW = {"sliding_window": 512}
TYPES = ["sliding_attention", "full_attention"] * 4


@pytest.mark.parametrize(
    ("model_type", "more", "windows"),
    [
        ("gemma3_text", {"sliding_window_pattern": 4}, ((512, 6), (0, 2))),
        ("gemma3_text", {}, ((512, 7), (0, 1))),
        ("gemma2", {}, ((512, 4), (0, 4))),
        ("cohere2", {}, ((513, 6), (0, 2))),
        ("granite_swa", {}, ((512, 6), (0, 2))),
        ("olmo3", {"layer_types": TYPES}, ((512, 4), (0, 4))),
        ("gpt_oss", {}, ((512, 4), (0, 4))),
        ("exaone4", {"sliding_window": None}, ((0, 8),)),
        ("mistral", {}, ((512, 8),)),
        ("mistral", {"sliding_window": None}, ((0, 8),)),
        ("mixtral", {}, ((512, 8),)),
        ("qwen2", {}, ((0, 8),)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, ((512, 8),)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, ((0, 8),)),
        ("llama", {"layer_types": ["full_attention"] * 8}, ((0, 8),)),
    ],
)
def test_windows_keep_the_last_tokens(
    model_type: str, more: dict[str, Any], windows: tuple[tuple[int, int], ...]
) -> None:
    shape = build({**LLAMA, **WINDOW, "model_type": model_type}, **more)
    assert shape.list_windows() == windows
    whole = sum(layers for tokens, layers in windows if not tokens)
    grown = [shape.compute_context_bytes_on_gpu(tokens) for tokens in (512, 514, 1_514)]
    assert grown[0] == 512 * 8 * PER_LAYER
    assert grown[2] - grown[1] == 1_000 * whole * PER_LAYER


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, ((512, 6), (0, 2))),
        ({"no_rope_layers": [1, 0] * 4}, ((512, 4), (0, 4))),
        ({"no_rope_layers": [1, 0] * 400}, ((512, 4), (0, 4))),
    ],
)
def test_chunks_keep_the_last_tokens(
    more: dict[str, Any], windows: tuple[tuple[int, int], ...]
) -> None:
    config = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 512}
    assert build(config, num_local_experts=2, **more).list_windows() == windows


@pytest.mark.parametrize(
    ("config", "more", "fault"),
    [
        (QWEN, {"layer_types": ["full_attention", "wavelets"] * 4}, "layer_types has 'wavelets'"),
        (QWEN, {"layer_types": ["sliding_attention"] * 8}, "layer_types has 'sliding_attention'"),
        (QWEN, {"layer_types": ["full_attention"]}, "layer_types has 1 of 8 layers"),
        (QWEN, {"layer_types": "full_attention"}, "write a list with a name for each layer"),
        (LLAMA, MAMBA, "mamba_num_heads is 16; plans do not know what it changes"),
        (NEMOTRON, {}, "layers_block_type (or hybrid_override_pattern) is missing"),
        (KIMI, {"linear_attn_config": {**KDA, "full_attn_layers": 3}}, "full_attn_layers is 3"),
        (KIMI, {"linear_attn_config": {**KDA, "kda_layers": [1]}}, "kda_layers is [1]"),
        (KIMI, {"linear_attn_config": {**KDA, "full_rank": 1}}, "linear_attn_config.full_rank is"),
    ],
)
def test_kinds_that_cannot_be_planned_are_refused(
    config: dict[str, Any], more: dict[str, Any], fault: str
) -> None:
    assert fault in refuse(config, **more)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)
KIND_FIELDS = (
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "full_attention_interval"),
    *("linear_attn_config", "attention_chunk_size", "no_rope_layers", "sliding_window"),
    *("sliding_window_pattern", "mlp_layer_types", "mlp_only_layers", "decoder_sparse_step"),
    *("num_hidden_layers", "num_nextn_predict_layers", "index_n_heads", "mamba_ssm_dtype"),
    *("hybrid_layer_pattern", "attn_layer_period", "use_sliding_window", "max_window_layers"),
    *DELTA_NET,
)


@given(
    st.sampled_from([QWEN, KIMI, NEMOTRON, GRANITE, LLAMA]),
    st.dictionaries(st.sampled_from(KIND_FIELDS), json_values, min_size=1, max_size=3),
)
def test_any_values_give_a_shape_or_one_line(config: dict[str, Any], more: dict[str, Any]) -> None:
    try:
        message = f"{build(config, **more).parameters} parameters"
    except UnknownModelError as error:
        message = str(error)
    assert 0 < len(message) < 300
    assert "\n" not in message


def test_the_number_of_layers_is_bounded() -> None:
    fault = "num_hidden_layers is 1001; write a number up to 1000"
    assert fault in refuse(LLAMA, num_hidden_layers=1_001)
