"""Which layers keep what, in each of the ways in which configs say it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape, UnknownModelError

LLAMA: dict[str, Any] = {
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
KDA = {"num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}
MAMBA = {
    "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2,
    "conv_kernel": 4,
}  # fmt: skip
SIX_LINEAR = ["linear_attention"] * 3 + ["full_attention"]


def build(**more: Any) -> ModelShape:
    return model_shape.from_config("m", {**LLAMA, **more})


def refuse(**more: Any) -> str:
    with pytest.raises(UnknownModelError) as raised:
        build(**more)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": SIX_LINEAR * 2, **DELTA_NET},
        {"full_attention_interval": 4, **DELTA_NET},
        {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2, **MAMBA},
        {"linear_attn_config": KDA},
    ],
)
def test_state_layers_keep_no_kv_and_a_state_that_does_not_grow(more: dict[str, Any]) -> None:
    shape = build(**more)
    assert shape.attention_layers == 2
    assert shape.kv_bytes_per_token == 2 * PER_LAYER
    state = shape.compute_state_bytes()
    assert state > 0
    short, long = (shape.compute_context_bytes_on_gpu(tokens) for tokens in (100, 10_100))
    assert (short, long - short) == (state + 200 * PER_LAYER, 20_000 * PER_LAYER)
    assert shape.compute_state_bytes(4) == state // 4


def test_states_have_the_type_that_the_config_names_or_the_models() -> None:
    matrices = 6 * 16 * 64 * 64
    own = build(full_attention_interval=4, **DELTA_NET)
    wide = build(full_attention_interval=4, mamba_ssm_dtype="float32", **DELTA_NET)
    assert wide.compute_state_bytes() - own.compute_state_bytes() == 2 * matrices
    assert "mamba_ssm_dtype is 'int3'" in refuse(
        full_attention_interval=4, mamba_ssm_dtype="int3", **DELTA_NET
    )


def test_layers_of_nemotron_are_one_thing_each() -> None:
    shape = build(
        hybrid_override_pattern="ME*MEM-E", model_type="nemotron_h", num_local_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=512, **MAMBA,
    )  # fmt: skip
    assert (shape.attention_layers, shape.states and shape.states.layers) == (1, 3)
    assert (shape.expert_layers, shape.dense_mlp_layers) == (3, 1)
    assert not shape.has_gated_mlp
    named = ["mamba", "moe", "attention", "mamba", "moe", "mamba", "mlp", "moe"]
    config = {**LLAMA, "model_type": "nemotron_h", "num_local_experts": 8, **MAMBA}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "layers_block_type": named}
    del config["num_hidden_layers"]
    assert model_shape.from_config("m", config) == shape


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 512, "sliding_window_pattern": 4}, ((512, 6), (0, 2))),
        ({"attention_chunk_size": 512}, ((512, 6), (0, 2))),
        ({"attention_chunk_size": 512, "no_rope_layers": [1, 0] * 4}, ((512, 4), (0, 4))),
        ({"attention_chunk_size": 512, "no_rope_layers": [1, 0] * 400}, ((512, 4), (0, 4))),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 4},
            ((512, 4), (0, 4)),
        ),
        ({"layer_types": ["full_attention"] * 8, "sliding_window": 512}, ((0, 8),)),
    ],
)
def test_windows_and_chunks_keep_the_last_tokens(
    more: dict[str, Any], windows: tuple[tuple[int, int], ...]
) -> None:
    shape = build(**more)
    assert shape.list_windows() == windows
    whole = windows[-1][1]
    grown = [shape.compute_context_bytes_on_gpu(tokens) for tokens in (512, 513, 1_513)]
    assert grown[0] == 512 * 8 * PER_LAYER
    assert grown[2] - grown[1] == 1_000 * whole * PER_LAYER


def test_indexers_cache_keys_of_their_own() -> None:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 64}
    latent |= {"qk_rope_head_dim": 64, "v_head_dim": 64}
    plain = build(**latent)
    indexed = build(index_n_heads=4, index_head_dim=128, **latent)
    assert indexed.kv_bytes_per_token - plain.kv_bytes_per_token == 8 * (128 + 4)
    more = 1024 * (128 + 4) + 768 * 4 * 128
    assert indexed.parameters - plain.parameters == 8 * more
    assert (plain.has_one_kind_of_cache, indexed.has_one_kind_of_cache) == (True, False)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"layer_types": ["full_attention", "wavelets"] * 4}, "layer_types has 'wavelets'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 of 8 layers"),
        ({"layer_types": "full_attention"}, "write a list with a name for each layer"),
        ({"layer_types": SIX_LINEAR * 2}, "linear_num_value_heads is missing"),
        (MAMBA, "ssm_state_size says that there are state layers, and nothing which"),
        ({"linear_attn_config": {**KDA, "full_attn_layers": 3}}, "full_attn_layers is 3"),
        ({"linear_attn_config": {**KDA, "full_attn_layers": [4, "8"]}}, "full_attn_layers is"),
    ],
)
def test_kinds_that_cannot_be_planned_are_refused(more: dict[str, Any], fault: str) -> None:
    assert fault in refuse(**more)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)
HYBRID: dict[str, Any] = {"full_attention_interval": 4, **DELTA_NET}
KIND_FIELDS = (
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "full_attention_interval"),
    *("linear_attn_config", "attention_chunk_size", "no_rope_layers", "sliding_window"),
    *("sliding_window_pattern", "mlp_layer_types", "mlp_only_layers", "decoder_sparse_step"),
    *("num_hidden_layers", "num_nextn_predict_layers", "index_n_heads", "mamba_ssm_dtype"),
    *DELTA_NET,
)


@given(st.dictionaries(st.sampled_from(KIND_FIELDS), json_values, min_size=1, max_size=3))
def test_any_values_give_a_shape_or_one_line(more: dict[str, Any]) -> None:
    try:
        message = f"{build(**(HYBRID | more)).parameters} parameters"
    except UnknownModelError as error:
        message = str(error)
    assert 0 < len(message) < 300
    assert "\n" not in message


def test_the_number_of_layers_is_bounded() -> None:
    assert "num_hidden_layers is 10001; write a number up to 10000" in refuse(
        num_hidden_layers=10_001
    )


@pytest.mark.parametrize(
    ("more", "dense"),
    [
        ({"first_k_dense_replace": 3}, 3),
        ({"decoder_sparse_step": 2}, 4),
        ({"interleave_moe_layer_step": 1, "mlp_only_layers": [0]}, 1),
        ({"mlp_layer_types": ["dense", "dense"] + ["sparse"] * 6}, 2),
        ({}, 0),
    ],
)
def test_dense_layers_beside_experts_are_counted(more: dict[str, Any], dense: int) -> None:
    shape = build(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512, **more)
    assert (shape.dense_mlp_layers, shape.expert_layers) == (dense, 8 - dense)


def test_heads_of_states_are_shared_evenly_and_do_not_limit_pairs() -> None:
    shape = build(full_attention_interval=4, **DELTA_NET)
    assert shape.explain_unsupported(8, 1) is None
    why = shape.explain_unsupported(16, 1)
    assert why == "state layers of 8 heads cannot be shared by 16 GPUs"
    assert shape.shardable_kv_heads is None
    assert replace(shape, states=None).shardable_kv_heads == 4


SPECULATION = '{"method": "mtp", "num_speculative_tokens": 1}'


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_layers_of_multi_token_prediction_count_when_engines_load_them(field: str) -> None:
    shape = build(**{field: 1})
    more = shape.with_speculation(SPECULATION)
    layer = (shape.parameters - 2 * 32000 * 1024) // 8 + 2 * 1024**2
    assert more.weight_bytes - shape.weight_bytes == 2 * layer
    assert more.kv_bytes_per_token - shape.kv_bytes_per_token == PER_LAYER
    assert more.compute_kv_bytes_on_gpu(1, 1) == 9 * PER_LAYER
    assert more.parameters == shape.parameters


@pytest.mark.parametrize(
    "config", ['{"method": "ngram"}', '{"model": "org/draft"}', "no JSON", "3", "[" * 4_000]
)
def test_other_drafts_change_nothing(config: str) -> None:
    shape = build(num_nextn_predict_layers=1)
    assert shape.with_speculation(config) == shape


def test_layers_that_the_config_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="states no num_nextn_predict_layers or mtp_num_hidden"):
        build().with_speculation(SPECULATION)
