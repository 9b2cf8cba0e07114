"""Experts under the names of each family, and which layers have a dense MLP instead."""

from typing import Any

import pytest

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import UnknownModelError

SIZES: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 32000,
    "max_position_embeddings": 65536, "hidden_act": "silu",
}  # fmt: skip
MLA = {
    "kv_lora_rank": 256, "q_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}  # fmt: skip


def build(model_type: str, **more: Any) -> model_shape.ModelShape:
    return model_shape.from_config("m", {**SIZES, "model_type": model_type, **more})


@pytest.mark.parametrize(
    ("model_type", "more", "shared"),
    [
        ("mixtral", {"num_local_experts": 16, "intermediate_size": 512}, 0),
        ("qwen3_moe", {"num_experts": 16}, 0),
        ("qwen2_moe", {"num_experts": 16, "shared_expert_intermediate_size": 768}, 768),
        ("deepseek_v3", {"n_routed_experts": 16, "n_shared_experts": 2, **MLA}, 1024),
        ("ernie4_5_moe", {"moe_num_experts": 16, "moe_k": 2, "moe_num_shared_experts": 1}, 512),
        ("nemotron_h", {"n_routed_experts": 16, "n_shared_experts": 1}, 640),
        ("gemma4_text", {"num_experts": 16, "top_k_experts": 2}, 2048),
    ],
)
def test_experts_are_found_under_the_names_of_each_family(
    model_type: str, more: dict[str, Any], shared: int
) -> None:
    own = {"moe_intermediate_size": 512, "num_experts_per_tok": 2}
    if model_type in ("mixtral", "ernie4_5_moe", "gemma4_text"):
        own.pop("num_experts_per_tok")
        own |= {"num_experts_per_tok": 2} if model_type == "mixtral" else {}
    if model_type == "mixtral":
        own.pop("moe_intermediate_size")
    if model_type == "nemotron_h":
        own |= {"moe_shared_expert_intermediate_size": 640, "hybrid_override_pattern": "ME*E*E*E"}
    if model_type == "gemma4_text":
        own |= {"hidden_size_per_layer_input": 0}
    experts = build(model_type, **own, **more).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (16, 2, 512)
    assert experts.shared_intermediate_size == shared


def test_experts_of_latents_have_weights_for_latents() -> None:
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    sizes |= {"hybrid_override_pattern": "ME*E*E*E", "n_shared_experts": 0}
    wide, narrow = build("nemotron_h", **sizes), build("nemotron_h", moe_latent_size=256, **sizes)
    one = 2 * 512 * (1024 - 256)
    assert wide.parameters - narrow.parameters == 4 * (16 * one - 2 * 1024 * 256)
    assert wide.active_parameters - narrow.active_parameters == 4 * (2 * one - 2 * 1024 * 256)


@pytest.mark.parametrize(
    ("model_type", "more", "dense"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 3, **MLA}, 3),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2, **MLA}, 5),
        ("qwen3_moe", {"decoder_sparse_step": 2}, 4),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0]}, 1),
        ("exaone_moe", {"mlp_layer_types": ["dense", "dense"] + ["sparse"] * 6}, 2),
        ("exaone_moe", {}, 1),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, **MLA}, 3),
        ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}, 4),
        ("llama4_text", {"interleave_moe_layer_step": 2}, 4),
        ("ernie4_5_moe", {"moe_layer_start_index": 2}, 2),
    ],
)
def test_dense_layers_beside_experts_are_counted(
    model_type: str, more: dict[str, Any], dense: int
) -> None:
    shape = build(model_type, **more)
    assert (shape.dense_mlp_layers, shape.expert_layers) == (dense, 8 - dense)


@pytest.mark.parametrize(
    ("model_type", "more", "fault"),
    [
        ("qwen3", {"num_experts": 8}, "num_experts is 8; plans do not know what it changes"),
        ("mixtral", {"moe_latent_size": 64}, "moe_latent_size is 64; plans do not know"),
        ("mixtral", {"moe_num_experts": 9}, "moe_num_experts is 9; plans do not know"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "write dense or sparse for each of 8"),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse"] * 8, **MLA}, "mlp_layer_types is ["),
        ("qwen3_moe", {"num_experts_per_tok": 900}, "num_experts_per_tok is 900; write at most"),
    ],
)
def test_experts_that_plans_do_not_know_are_refused_by_name(
    model_type: str, more: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UnknownModelError) as raised:
        build(model_type, **more)
    assert fault in str(raised.value)
