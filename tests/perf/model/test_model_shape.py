"""Model descriptions from the table and from config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.model import model_shape, quantization
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.perf.model.quantization import WeightPart

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LLAVA = {"model_type": "llava"}
LATENT = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": None,
}

# Parameters as published with each model, in billions: all, and active for one token.
PUBLISHED = {
    "facebook/opt-13b": (12.85, 12.85),
    "facebook/opt-66b": (65.7, 65.7),
    "opt-175b": (175, 175),
    "meta-llama/Llama-2-7b-hf": (6.738, 6.738),
    "meta-llama/Llama-2-70b-chat-hf": (68.98, 68.98),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 8.03),
    "meta-llama/Llama-3.1-70B": (70.55, 70.55),
    "meta-llama/Meta-Llama-3.1-405B-Instruct": (405.9, 405.9),
    "Qwen/Qwen-72B": (72.3, 72.3),
    "Qwen/Qwen2.5-7B-Instruct": (7.62, 7.62),
    "Qwen/Qwen2.5-32B": (32.8, 32.8),
    "Qwen/Qwen2.5-72B": (72.7, 72.7),
    "Qwen/Qwen3-8B": (8.19, 8.19),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "internlm/internlm-20b": (20.1, 20.1),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 12.9),
    "mistralai/Mistral-7B-Instruct-v0.3": (7.25, 7.25),
    "deepseek-ai/DeepSeek-V3": (671, 37.5),
    "bigscience/bloom": (176.2, 176.2),
}


def write(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_opt_13b_is_described_with_and_without_its_owner() -> None:
    shape = model_shape.load_shape("facebook/opt-13b")
    assert shape == model_shape.load_shape("opt-13b")
    assert shape.kv_bytes_per_token == 2 * 40 * 5120 * 2
    assert shape.max_model_len == 2048


def test_grouped_query_attention_keeps_fewer_heads(tmp_path: Path) -> None:
    shape = model_shape.load_shape(write(tmp_path, LLAMA))
    assert shape.head_size == 128
    assert shape.kv_bytes_per_token == 131_072


def test_a_config_with_its_own_head_size_is_followed(tmp_path: Path) -> None:
    config = {**LLAMA, "head_dim": 64}
    assert model_shape.load_shape(write(tmp_path, config)).kv_bytes_per_token == 2 * 32 * 8 * 64 * 2


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_checkpoints_of_32_bits_are_loaded_with_16(name: str) -> None:
    shape = model_shape.from_config("m", {**LLAMA, name: "float32"})
    assert shape.weight_bytes == model_shape.from_config("m", LLAMA).weight_bytes
    assert shape.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 2), ("float16", 1), ("auto", 1)])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_weights_and_caches_have_the_type_that_engines_are_given(
    dtype: str, factor: int, stored: str
) -> None:
    own = model_shape.from_config("m", LLAMA)
    shape = model_shape.from_config("m", {**LLAMA, "torch_dtype": stored}, dtype)
    assert shape.weight_bytes == factor * own.weight_bytes
    assert shape.kv_bytes_per_token == factor * own.kv_bytes_per_token


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": LLAMA}
    assert model_shape.load_shape(write(tmp_path, config)).num_layers == 32


def test_an_unknown_name_is_refused_with_the_described_ones() -> None:
    with pytest.raises(model_shape.UnknownModelError, match="opt-13b"):
        model_shape.load_shape("someone/else")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"num_attention_heads": 1}'])
def test_a_broken_config_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(model_shape.UnknownModelError, match=r"config\.json"):
        model_shape.load_shape(str(tmp_path))


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model_shape.UnknownModelError, match="int3"):
        model_shape.load_shape(write(tmp_path, {**LLAMA, "torch_dtype": "int3"}))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model_shape.UnknownModelError, match="cannot be read"):
        model_shape.load_shape(str(tmp_path))


def refused(config: object) -> str:
    with pytest.raises(UnknownModelError) as raised:
        model_shape.from_config("m", config)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_known_models_have_the_parameters_that_were_published(
    name: str, billions: tuple[float, float]
) -> None:
    shape = model_shape.load_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(billions[0], rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(billions[1], rel=0.02)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        ("LLAMA-2-70B", "meta-llama/Llama-2-70b-chat-hf"),
        ("llama2-70b", "meta-llama/Llama-2-70b"),
        ("bloom-176b", "bigscience/bloom"),
        ("hf://facebook/OPT-66b", "opt-66b"),
    ],
)
def test_every_way_to_write_a_name_is_one_model(name: str, same: str) -> None:
    assert model_shape.load_shape(name) == model_shape.load_shape(same)


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen2.5-7B-Instruct-AWQ", "llama-3.1-8b-fp8", "llama", "someone/Qwen3-32B-FP8"),
        *("nvidia/Llama-3.1-8B-Instruct-FP8", "RedHatAI/gpt-oss-120b-FP8"),
    ],
)
def test_a_quantised_copy_and_half_a_name_do_not_match_the_model(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"only its config.json .* known: opt-13b, "):
        model_shape.load_shape(name)


@pytest.mark.parametrize(
    ("name", "plain", "is_blockwise"),
    [
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", True),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b", True),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", False),
        ("hf://RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b", False),
        ("neuralmagic/Meta-Llama-3.1-405B-Instruct-FP8-dynamic", "llama-3.1-405b", False),
    ],
)
def test_a_quantised_copy_of_an_owner_with_one_format_has_weights_of_8_bits(
    name: str, plain: str, is_blockwise: bool
) -> None:
    shape, wide = model_shape.load_shape(name), model_shape.load_shape(plain)
    assert shape.quantization is not None
    assert (shape.bytes_per_weight, shape.quantization.is_blockwise) == (1, is_blockwise)
    assert shape.quantization.is_8_bit_compute
    assert shape.parameters == wide.parameters
    assert shape.kv_bytes_per_token == wide.kv_bytes_per_token
    assert shape.name.startswith(plain)
    assert shape.name != plain


def test_a_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    assert model_shape.load_shape(f"{folder}/config.json") == model_shape.load_shape(folder)
    assert model_shape.load_shape(folder).name == tmp_path.name


def test_one_latent_is_cached_for_all_heads() -> None:
    # DeepSeek-V3's report, section 2.1.1: 512 + 64 numbers per token and layer.
    shape = model_shape.load_shape("deepseek-v3")
    assert shape.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert shape.weight_bytes == pytest.approx(671e9, rel=0.01)
    assert shape.decode_attention_flops > 3 * shape.prefill_attention_flops


def test_flops_are_two_per_active_weight() -> None:
    shape = model_shape.load_shape("llama-3.1-8b")
    layers = shape.parameters - 2 * shape.embedding_parameters
    assert shape.flops_per_token == 2 * layers
    assert 2 * shape.lm_head_parameters == 2 * 128256 * 4096
    assert shape.prefill_attention_flops == 4 * 32 * 4096


def test_few_tokens_touch_few_experts_and_many_touch_all() -> None:
    experts = model_shape.from_config("mixtral", MIXTRAL).experts
    assert experts is not None
    assert experts.count_activated(0) == 0
    assert experts.count_activated(1) == pytest.approx(2)
    assert 2 < experts.count_activated(4) < 8
    assert experts.count_activated(1000) == pytest.approx(8)


@pytest.mark.parametrize(
    ("quantization", "bits", "is_8_bit"),
    [
        ({"quant_method": "fp8"}, 8, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.156, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4, False),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8.75, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int"},
                        "input_activations": {"num_bits": 8},
                    }
                },
            },
            8,
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "group_size": 128},
                        "input_activations": None,
                    }
                },
            },
            4.125,
            False,
        ),
    ],
)
def test_quantised_weights_weigh_less_and_embeddings_do_not(
    quantization: dict[str, object], bits: float, is_8_bit: bool
) -> None:
    plain = model_shape.from_config("m", LLAMA)
    shape = model_shape.from_config("m", {**LLAMA, "quantization_config": quantization})
    assert shape.quantization is not None
    assert shape.quantization.weight_bits == pytest.approx(bits, abs=0.001)
    assert shape.quantization.is_8_bit_compute == is_8_bit
    tables = 2 * plain.embedding_parameters * 2
    layers = plain.weight_bytes - tables
    assert shape.weight_bytes == pytest.approx(tables + layers * bits / 16, rel=1e-3)
    assert shape.kv_bytes_per_token == plain.kv_bytes_per_token


@pytest.mark.parametrize(
    ("change", "parameters"),
    [
        ({"tie_word_embeddings": True}, -128256 * 4096),
        ({"model_type": "apertus", "hidden_act": "xielu"}, -32 * 4096 * 14336),
        ({"model_type": "cohere"}, -128256 * 4096),
    ],
)
def test_what_a_model_type_implies_is_counted(change: dict[str, object], parameters: int) -> None:
    plain = model_shape.from_config("m", LLAMA)
    assert (
        model_shape.from_config("m", {**LLAMA, **change}).parameters - plain.parameters
        == parameters
    )


def test_falcons_words_are_understood() -> None:
    config = {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
    }
    seven = model_shape.from_config("falcon-7b", config)
    assert seven.num_kv_heads == 1
    assert seven.parameters / 1e9 == pytest.approx(6.92, rel=0.01)
    newer = {**config, "new_decoder_architecture": True, "num_attention_heads": 64}
    newer |= {"hidden_size": 8192, "num_kv_heads": 8}
    assert model_shape.from_config("falcon-40b", newer).num_kv_heads == 8


@pytest.mark.parametrize(
    ("tensor", "pipeline", "reason"),
    [
        (8, 4, None),
        (16, 1, None),
        (3, 1, "32 attention heads cannot be shared by 3 GPUs"),
        (1, 33, "32 layers cannot fill 33 pipeline stages"),
        (0, 1, "parallel sizes 0 x 1 are below 1"),
        (1, -1, "parallel sizes 1 x -1 are below 1"),
    ],
)
def test_a_model_says_why_it_cannot_be_split(tensor: int, pipeline: int, reason: str) -> None:
    assert model_shape.from_config("m", LLAMA).explain_unsupported(tensor, pipeline) == reason


def test_kv_heads_and_mlp_must_divide_too() -> None:
    heads = {"num_attention_heads": 48, "num_key_value_heads": 6, "head_dim": 128}
    few = model_shape.from_config("m", {**LLAMA, **heads})
    assert few.explain_unsupported(4, 1) == "6 KV heads cannot be shared by 4 GPUs"
    odd = model_shape.from_config("m", {**LLAMA, "intermediate_size": 14337})
    assert odd.explain_unsupported(2, 1) == "an MLP of width 14337 cannot be shared by 2 GPUs"


def test_a_number_may_be_written_for_each_layer_if_it_is_the_same() -> None:
    layers = LLAMA["num_hidden_layers"]
    listed = {**LLAMA, "intermediate_size": [LLAMA["intermediate_size"]] * layers}
    assert model_shape.from_config("m", listed) == model_shape.from_config("m", LLAMA)
    marked = {**LLAMA, "is_composition": True}
    assert model_shape.from_config("m", marked) == model_shape.from_config("m", LLAMA)
    for other in ([], [True] * layers, [1, 2]):
        with pytest.raises(model_shape.UnknownModelError, match="intermediate_size is"):
            model_shape.from_config("m", {**LLAMA, "intermediate_size": other})


def test_experts_are_shared_by_all_ranks_as_wholes_or_each_of_them() -> None:
    dense = model_shape.from_config("m", LLAMA)
    for sizes, expert in (((1, 1, 2), False), ((2, 1), True)):
        assert dense.explain_unsupported(*sizes, expert=expert) == (
            "it has no experts, and without them data-parallel ranks are separate instances"
        )
    # 128 experts of width 768, and 4 KV heads.
    sparse = model_shape.load_shape("qwen3-30b-a3b")
    assert sparse.explain_unsupported(2, 1, 16) is None
    assert sparse.explain_unsupported(1, 1, 5) == ("an MLP of width 768 cannot be shared by 5 GPUs")
    assert sparse.explain_unsupported(1, 1, 5, expert=True) is None
    assert sparse.explain_unsupported(16, 1, 16, expert=True) == (
        "128 experts do not suffice for 256 GPUs"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "num_hidden_layers": 0}, "m: num_hidden_layers is 0; write a whole number"),
        ({**LLAMA, "hidden_size": -1}, "m: hidden_size is -1; write a whole number"),
        ({**LLAMA, "vocab_size": "many"}, "m: vocab_size is 'many'; write a whole number"),
        ({**LLAMA, "vocab_size": 1.5}, "m: vocab_size is 1.5; write a whole number"),
        ({**LLAMA, "vocab_size": float("nan")}, "m: vocab_size is nan; write a whole number"),
        ({**LLAMA, "vocab_size": True}, "m: vocab_size is True; write a whole number"),
        ({**LLAMA, "hidden_size": [1, 2] * 99}, "m: hidden_size is [1, 2, 1, 2, 1, 2"),
        ({**LLAMA, "hidden_size": 10**30}, "write a number up to 1000000000"),
        ({**LLAMA, "num_key_value_heads": 5}, "m: num_key_value_heads is 5; the 32 attention"),
        ({**LLAMA, "hidden_size": 4095}, "m: head_dim is None; set it: 32 heads do not divide"),
        ({**LLAMA, "torch_dtype": 16}, "m: torch_dtype is 16; write a text"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "m: tie_word_embeddings is 'no'; write true or"),
        ({**LLAMA, "is_encoder_decoder": True}, "only decoder-only models are served"),
        (LATENT, "m: qk_rope_head_dim is missing; add it"),
        ({**LLAMA, "kv_lora_rank": 512}, "m: kv_lora_rank is 512; plans do not know what it"),
        ({**LLAMA, "model_type": "wavelets"}, "m: model_type is 'wavelets'; plans do not know"),
        ({**LLAMA, "model_type": None}, "m: model_type is missing; add it"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9; write at most the 8"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "num_experts_per_tok"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "quip"}},
            "m: quantization_config.quant_method is 'quip'; known are fp8, awq",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq"}},
            "m: quantization_config.bits (or w_bit) is missing",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors"}},
            "m: quantization_config.config_groups is missing",
        ),
        ({**LLAMA, "quantization_config": "fp8"}, "quantization_config is 'fp8'; write an object"),
        ({**LLAVA, "text_config": []}, "m: text_config is []; write an object"),
        ({**LLAVA, "text_config": {**LLAMA, "vocab_size": 0}}, "m: text_config.vocab_size is 0"),
        ({**LLAVA, "text_config": {"text_config": LLAMA}}, "text_config.text_config is {"),
        (LLAVA, "m: text_config is missing; add it"),
        ([], "m: holds no object"),
        (None, "m: holds no object"),
    ],
)
def test_every_fault_of_a_config_is_one_line(config: object, message: str) -> None:
    assert message in refused(config)


def test_a_config_inside_itself_is_refused() -> None:
    config: dict[str, object] = dict(LLAMA)
    config["text_config"] = config
    assert "llama has no such part" in refused(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "hidden_size is 9999"),
        ('{"model_type": "llama", "hidden_size": NaN}', "hidden_size is nan"),
        ('{"hidden_size": 1', "is no JSON"),
        ("", "is no JSON"),
        ("null", "holds no object"),
    ],
)
def test_a_hostile_file_is_one_line_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownModelError) as raised:
        model_shape.load_shape(str(tmp_path))
    assert str(raised.value).startswith(f"{tmp_path}/config.json: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnknownModelError, match=r"config\.json: is no JSON"):
        model_shape.load_shape(str(tmp_path))


def test_a_multimodal_config_lends_its_text_part_the_quantisation(tmp_path: Path) -> None:
    outer = {**LLAVA, "quantization_config": {"quant_method": "fp8"}, "text_config": LLAMA}
    shape = model_shape.load_shape(write(tmp_path, outer))
    assert shape.bytes_per_weight == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(field=st.sampled_from([*MIXTRAL, "quantization_config", "text_config"]), value=json_values)
def test_any_value_in_any_field_gives_a_shape_or_one_line(field: str, value: object) -> None:
    try:
        message = f"{model_shape.from_config('m', {**MIXTRAL, field: value}).parameters} parameters"
    except UnknownModelError as error:
        message = str(error)
    assert 0 < len(message) < 300
    assert "\n" not in message


@given(
    shape=st.sampled_from([model_shape.load_shape(name) for name in CONFIGS]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 16),
)
def test_shares_of_all_gpus_are_never_less_than_the_whole(
    shape: ModelShape, tensor: int, pipeline: int
) -> None:
    gpus = tensor * pipeline
    assert shape.compute_kv_bytes_on_gpu(tensor, pipeline) * gpus >= shape.kv_bytes_per_token
    assert (
        shape.count_attention_parameters(tensor) * tensor
        >= shape.count_attention_parameters() * 0.999
    )
    assert shape.active_parameters <= shape.parameters


def test_gpt_oss_has_16_bit_attention_4_bit_experts_and_windows() -> None:
    shape = model_shape.load_shape("openai/gpt-oss-120b")
    assert shape.parameters == pytest.approx(116.8e9, rel=0.01)
    assert shape.weight_bytes == pytest.approx(65e9, rel=0.04)
    assert shape.list_windows() == ((128, 18), (0, 18))
    assert shape.get_bytes_per_weight(WeightPart.ATTENTION) == 2


def test_layer_types_beyond_the_number_of_layers_do_not_count() -> None:
    config = model_shape.known_models.CONFIGS["gpt-oss-120b"] | {"num_hidden_layers": 4}
    assert model_shape.from_config("m", config).list_windows() == ((128, 2), (0, 2))


def test_a_window_without_a_list_of_layers_is_that_of_all_layers() -> None:
    assert model_shape.from_config("m", LLAMA).list_windows()[0][0] == 0
    unlisted = model_shape.from_config("m", {**LLAMA, "sliding_window": 4096})
    assert unlisted.list_windows() == ((4096, 32),)
    listed = {"sliding_window": 4096, "layer_types": ["full_attention"] * 32}
    assert model_shape.from_config("m", {**LLAMA, **listed}).sliding_window is None


def test_qwen3_235b_has_its_parameters() -> None:
    shape = model_shape.load_shape("Qwen/Qwen3-235B-A22B")
    assert shape.parameters == pytest.approx(235e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(22.2e9, rel=0.03)


@pytest.mark.parametrize(
    ("quantization", "kv_bytes"),
    [
        ({"quant_method": "fp8"}, 2),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 2),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
            1,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            1,
        ),
    ],
)
def test_a_checkpoint_with_scales_for_kv_has_kv_of_8_bits(
    quantization: dict[str, object], kv_bytes: int
) -> None:
    shape = model_shape.from_config("m", {**LLAMA, "quantization_config": quantization})
    assert shape.kv_dtype_bytes == kv_bytes
    assert shape.with_kv_dtype("auto") == shape


def test_the_engine_s_flag_changes_the_type_of_kv() -> None:
    shape = model_shape.load_shape("llama-3.1-8b")
    narrow = shape.with_kv_dtype("fp8_e4m3")
    assert 2 * narrow.kv_bytes_per_token == shape.kv_bytes_per_token
    assert narrow.weight_bytes == shape.weight_bytes
    assert narrow.with_kv_dtype("bfloat16") == shape
    with pytest.raises(ValueError, match="nvfp4: cannot be planned for; write auto, float16"):
        shape.with_kv_dtype("nvfp4")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    "input_activations": {"num_bits": 4, "type": "float"},
                }
            },
        },
    ],
)
def test_nvfp4_computes_in_4_bits(quantization: dict[str, object]) -> None:
    shape = model_shape.from_config("m", {**LLAMA, "quantization_config": quantization})
    assert shape.quantization is not None
    assert shape.quantization.is_4_bit_compute
    assert shape.quantization.weight_bits == 4.5


def test_weights_of_4_bits_alone_do_not_compute_in_4_bits() -> None:
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
    part = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    shape = model_shape.from_config("m", {**LLAMA, "quantization_config": part})
    assert shape.quantization is not None
    assert not shape.quantization.is_4_bit_compute


def test_the_engine_s_flag_quantises_weights_at_load() -> None:
    shape = model_shape.load_shape("llama-3.1-70b")
    narrow = shape.with_quantization("fp8")
    assert narrow.weight_bytes == pytest.approx(shape.weight_bytes / 2, rel=0.04)
    assert narrow.quantization is not None
    assert narrow.quantization.is_8_bit_compute
    assert narrow.kv_bytes_per_token == shape.kv_bytes_per_token
    blocks = shape.with_quantization("fp8_per_block").quantization
    assert blocks is not None
    assert blocks.is_blockwise
    assert shape.explain_unplanned("fp8") is None
    assert shape.with_quantization("awq") == shape
    why = shape.explain_unplanned("awq")
    assert why is not None
    assert why.startswith("awq: plans count with weights of 16 bits")


@pytest.mark.parametrize(
    ("own", "flag"), [("fp8", "compressed-tensors"), ("compressed-tensors", "fp8")]
)
def test_copies_in_fp8_may_be_named_either_way(own: str, flag: str) -> None:
    weights = quantization.Quantization(own, 8, is_8_bit_compute=True)
    shape = replace(model_shape.load_shape("llama-3.1-70b"), quantization=weights)
    assert shape.with_quantization(flag) == shape
    with pytest.raises(ValueError, match=f"has weights of {own} already"):
        shape.with_quantization("awq")


def test_a_checkpoint_s_own_quantisation_stays() -> None:
    shape = model_shape.load_shape("gpt-oss-120b")
    assert shape.with_quantization("mxfp4") == shape
    with pytest.raises(ValueError, match="fp8: gpt-oss-120b has weights of mxfp4 already"):
        shape.with_quantization("fp8")
