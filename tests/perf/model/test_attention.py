"""Latents and their indexers, and layers whose heads differ."""

from typing import Any

import pytest

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape, UnknownModelError

GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "hidden_size": 1024,
    "num_attention_heads": 16, "vocab_size": 32000, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "index_n_heads": 4,
    "index_head_dim": 128, "n_routed_experts": 8, "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}  # fmt: skip
MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "hidden_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 16, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window_size": 128,
    "moe_layer_freq": [0, 1, 1, 1], "n_routed_experts": 8, "moe_intermediate_size": 512,
    "intermediate_size": 2048, "vocab_size": 32000,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
    "hidden_size_per_layer_input": 0, "intermediate_size": 2048, "vocab_size": 32000,
}  # fmt: skip


def build(config: dict[str, Any], **more: Any) -> ModelShape:
    return model_shape.from_config("m", {**config, **more})


def test_indexers_cache_keys_of_their_own() -> None:
    plain, indexed = build(GLM, index_n_heads=0, index_head_dim=0), build(GLM)
    assert indexed.kv_bytes_per_token - plain.kv_bytes_per_token == 8 * (128 + 4)
    more = 1024 * (128 + 4) + 768 * 4 * 128
    assert indexed.parameters - plain.parameters == 8 * more
    assert (plain.has_one_kind_of_cache, indexed.has_one_kind_of_cache) == (True, False)


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, 8),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 4),
        ({"index_topk_pattern": "FFSSSFSS"}, 3),
    ],
)
def test_some_layers_use_the_choice_of_an_earlier_indexer(
    more: dict[str, Any], layers: int
) -> None:
    shape = build(GLM, **more)
    assert shape.kv_bytes_per_token == 8 * 576 * 2 + layers * 132
    assert shape.latent is not None
    assert shape.latent.index_layers == layers


def test_sparse_latents_of_8_bits_have_scales_and_a_wide_rotated_key() -> None:
    shape = build(GLM).with_kv_dtype("fp8_e4m3")
    assert shape.kv_bytes_per_token == 8 * (656 + 132)
    plain = build(GLM, index_n_heads=0, index_head_dim=0).with_kv_dtype("fp8_e4m3")
    assert plain.kv_bytes_per_token == 8 * 576


def test_windows_with_heads_of_their_own_count_beside_the_others() -> None:
    shape = build(MIMO)
    whole, windowed = 4 * (192 + 128) * 2, 3 * 8 * (192 + 128) * 2
    assert shape.kv_bytes_per_token == whole
    assert shape.copied_bytes_per_token == whole + windowed
    kept = [shape.compute_context_bytes_on_gpu(tokens) for tokens in (100, 128, 1_128)]
    assert kept[0] == 100 * (whole + windowed)
    assert kept[2] - kept[1] == 1_000 * whole
    assert shape.compute_copied_bytes_on_gpu(4) == (whole + windowed) // 4
    assert not shape.has_one_kind_of_cache
    assert shape.explain_unsupported(16, 1) is None
    assert build(MIMO, swa_num_key_value_heads=1, swa_num_attention_heads=3).explain_unsupported(
        2, 1
    ) == ("3 attention heads cannot be shared by 2 GPUs")
    layer = 1024 * (192 + 128) * (16 + 4)
    other = 1024 * (192 + 128) * (16 + 8)
    assert shape.count_attention_parameters() == (layer + 3 * other) / 4


def test_whole_layers_may_have_heads_of_another_size() -> None:
    shape = build(GEMMA)
    # Five layers with windows, one without.
    assert shape.kv_bytes_per_token == 2 * 2 * 512 * 2
    assert shape.copied_bytes_per_token == 2 * 2 * 512 * 2 + 5 * 2 * 8 * 256 * 2
    assert build(GEMMA, attention_k_eq_v=False).kv_bytes_per_token == 2 * 8 * 512 * 2


def test_layers_that_read_the_kv_of_others_keep_none() -> None:
    plain, shared = build(GEMMA), build(GEMMA, num_kv_shared_layers=3)
    assert shared.kv_bytes_per_token == 0
    assert shared.copied_bytes_per_token == 3 * 2 * 8 * 256 * 2
    unused = 2 * 1024 * (2 * 8 * 256 + 2 * 512)
    assert plain.parameters - shared.parameters == pytest.approx(unused, rel=1e-4)


def test_layers_may_look_tokens_up_in_tables_of_their_own() -> None:
    plain, tables = build(GEMMA), build(GEMMA, hidden_size_per_layer_input=64)
    table = 6 * 262_144 * 64
    assert tables.parameters - plain.parameters == table + 6 * 3 * 1024 * 64
    assert tables.embedding_parameters - plain.embedding_parameters == table


@pytest.mark.parametrize(
    ("config", "more", "fault"),
    [
        (GLM, {"indexer_types": ["shared"] * 8}, "indexer_types is ['shared'"),
        (GLM, {"index_topk_pattern": 3}, "index_topk_pattern is 3"),
        (MIMO, {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is [0, 1]; write 0 or 1"),
        (GEMMA, {"use_double_wide_mlp": True}, "use_double_wide_mlp is True"),
        (GEMMA, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ],
)
def test_what_plans_do_not_know_of_attention_is_refused_by_name(
    config: dict[str, Any], more: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UnknownModelError) as raised:
        build(config, **more)
    assert fault in str(raised.value)


def test_a_table_of_gemma_must_be_described() -> None:
    config = {name: value for name, value in GEMMA.items() if name != "hidden_size_per_layer_input"}
    with pytest.raises(UnknownModelError, match="hidden_size_per_layer_input is missing"):
        build(config)
