"""Bits of each part of a model, as checkpoints state them and vLLM reads them."""

from collections.abc import Mapping
from typing import Any

import pytest

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.perf.model.quantization import Quantization, WeightPart

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 65536,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
}  # fmt: skip
DENSE: dict[str, Any] = {**QWEN, "num_experts": 0}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}
FP8_GROUP = {"weights": FP8, "input_activations": FP8, "targets": ["re:.*self_attn.*"]}
NVFP4_GROUP = {"weights": NVFP4, "input_activations": NVFP4, "targets": ["re:.*mlp.*"]}
INT4 = {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.23.0"}}


def build(config: dict[str, Any], quantization: Mapping[str, Any]) -> ModelShape:
    return model_shape.from_config("m", {**config, "quantization_config": quantization})


def read(config: dict[str, Any], quantization: Mapping[str, Any]) -> Quantization:
    found = build(config, quantization).quantization
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "quantization", "bits"),
    [
        # Attention, MLP or experts, LM head; None keeps 16 bits.
        (DENSE, {"quant_method": "fp8"}, (8, 8, None)),
        (DENSE, {"quant_method": "modelopt", "quant_algo": "FP8"}, (8, 8, 8)),
        (DENSE, {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, (8, 8, 8)),
        (DENSE, {**MODELOPT, "quantization": {"quant_algo": "FP8"}}, (8, 8, 8)),
        (
            DENSE,
            {**MODELOPT, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
            (4.5, 4.5, None),
        ),
        (
            QWEN,
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"],
            },
            (None, 4.5, None),
        ),
        (
            QWEN,
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1.mlp*"]},
            (4.5, (3 * 4.5 + 16) / 4, 4.5),
        ),
        (QWEN, {"quant_method": "mxfp4"}, (None, 4.25, None)),
        (
            DENSE,
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]},
            (8, (11 * 8 + 16) / 12, None),
        ),
        (
            DENSE,
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
             "modules_to_not_convert": ["self_attn"]},
            (None, 4 + 20 / 128, None),
        ),
        (
            QWEN,
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
             "modules_to_not_convert": ["gate"]},
            (4 + 20 / 128, 4 + 20 / 128, None),
        ),
        (
            QWEN,
            {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"],
             "config_groups": {"group_0": {"weights": INT4, "targets": ["Linear"]}}},
            (4.125, 4.125, None),
        ),
        (
            DENSE,
            {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
             "config_groups": {"group_0": FP8_GROUP, "group_1": NVFP4_GROUP}},
            (8, 4.5, None),
        ),
        (
            QWEN,
            {"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"],
             "config_groups": {"group_0": {"weights": INT4, "targets": ["Linear"]}}},
            (None, 4.125, None),
        ),
        (
            DENSE,
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {
                 **{f"model.layers.{i}.self_attn.{part}_proj": {"quant_algo": "FP8"}
                    for i in range(4) for part in "qkvo"},
                 **{f"model.layers.{i}.mlp.{part}_proj": {"quant_algo": "W4A16_NVFP4"}
                    for i in range(4) for part in ("gate", "up", "down")},
                 "lm_head": {"quant_algo": "FP8"},
             }},
            (8, 4.5, 8),
        ),
    ],
)  # fmt: skip
def test_each_part_has_the_bits_that_the_checkpoint_states(
    config: dict[str, Any],
    quantization: Mapping[str, Any],
    bits: tuple[float | None, float, float | None],
) -> None:
    found = read(config, quantization)
    own = WeightPart.EXPERTS if config["num_experts"] else WeightPart.MLP
    assert found.get_bits(WeightPart.ATTENTION) == (bits[0] and pytest.approx(bits[0]))
    assert found.get_bits(own) == pytest.approx(bits[1])
    assert found.get_bits(WeightPart.LM_HEAD) == bits[2]
    shape, plain = build(config, quantization), model_shape.from_config("m", config)
    assert shape.parameters == plain.parameters
    assert shape.weight_bytes < plain.weight_bytes
    attention = shape.compute_attention_weight_bytes()
    assert attention == shape.count_attention_parameters() * (bits[0] or 16) / 8


def test_the_main_format_says_in_which_bits_is_computed() -> None:
    mixed = {"group_0": FP8_GROUP, "group_1": NVFP4_GROUP}
    found = read(DENSE, {"quant_method": "compressed-tensors", "config_groups": mixed})
    assert (found.is_4_bit_compute, found.is_8_bit_compute) == (True, False)
    weights = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    assert not read(DENSE, weights).is_4_bit_compute
    assert read(DENSE, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}).is_blockwise


@pytest.mark.parametrize(
    ("quantization", "fault"),
    [
        ({"quant_method": "modelopt", "quant_algo": "INT3"}, "quant_algo is 'INT3'; known are FP8"),
        ({"quant_algo": "FP8"}, "quant_method is None; known are fp8"),
        (
            {**MODELOPT, "quantization": {"quant_algo": "MIXED_PRECISION"}},
            "quantization.quant_algo is 'MIXED_PRECISION'; without a quant_method vLLM knows",
        ),
        ({"quantization": {"quant_algo": "FP8"}}, "quant_method is None"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantization_config.quantized_layers is missing",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}},
            "quantized_layers names some of gate_proj, up_proj in layer 0",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "INT3"}}},
            "quantized_layers.model.layers.0.mlp.quant_algo is INT3",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8",
             "ignore": ["model.layers.0.self_attn.wavelets"]},
            "quantization_config.ignore names 'model.layers.0.self_attn.wavelets', a layer that",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.q_proj"]},
            "ignore names some of q_proj, k_proj, v_proj in layer 0",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic is {"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "store_dtype is 'mxfp4'"),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"a": {"weights": FP8, "targets": ["re:(a+)+"]}}},
            "config_groups.a.targets has 're:(a+)+'",
        ),
        ({"quant_method": "quark"}, "quant_method is 'quark'; known are fp8, awq"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo is 'NVFP4'; plans know KV of 8 bits",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_the_field_that_says_it(
    quantization: Mapping[str, Any], fault: str
) -> None:
    with pytest.raises(UnknownModelError) as raised:
        build(DENSE, quantization)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("quantization", "kv_bytes"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1),
        ({**MODELOPT, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}}, 1),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, 2),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8,
             "config_groups": {"a": {"weights": FP8}}},
            1,
        ),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": False,
             "config_groups": {"a": {"weights": FP8}}},
            2,
        ),
    ],
)  # fmt: skip
def test_kv_has_the_bits_that_the_checkpoint_states(
    quantization: Mapping[str, Any], kv_bytes: int
) -> None:
    assert build(DENSE, quantization).kv_dtype_bytes == kv_bytes


def test_parts_without_layers_do_not_matter() -> None:
    assert build(DENSE, {"quant_method": "mxfp4"}).quantization is None
    tied = {**DENSE, "tie_word_embeddings": True}
    assert (
        read(tied, {"quant_method": "modelopt", "quant_algo": "FP8"}).get_bits(WeightPart.MLP) == 8
    )
