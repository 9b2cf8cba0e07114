"""Models from kernels."""

from dataclasses import replace

import numpy as np
import pytest

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.kernels import composition, tables
from cleave.perf.kernels.tables import KernelTables
from cleave.perf.model import known_models, model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.profile import operator_fit
from cleave.perf.profile.profile import Operators
from cleave.perf.timing import EngineTiming


def load(gpu: str = "H200") -> KernelTables:
    found = tables.find_tables(find_gpu(gpu))
    assert found is not None
    return found


def build(model: str, tensor: int, gpu: str = "H200") -> Operators | None:
    return composition.build_operators(model_shape.load_shape(model), load(gpu), tensor)


def time(model: str, tensor: int, gpu: str = "H200") -> EngineTiming:
    built = build(model, tensor, gpu)
    assert built is not None
    return operator_fit.to_timing(built, tensor)


def test_products_have_the_sides_that_vllm_gives_them() -> None:
    sides = composition.list_product_sides(model_shape.load_shape("llama-3.1-70b"), 8)
    assert sides is not None
    assert {each.name: (each.n, each.k) for each in sides} == {
        "qkv": (1280, 8192),
        "out": (8192, 1024),
        "mlp_up": (7168, 8192),
        "mlp_down": (8192, 3584),
    }


def test_a_pass_takes_at_least_as_long_as_reading_the_weights() -> None:
    shape, gpu = model_shape.load_shape("llama-3.1-8b"), find_gpu("H200")
    least_ms = shape.weight_bytes / (gpu.memory_gbps * 1e6)
    ms = time("llama-3.1-8b", 1).predict_decode_ms(1, 1)
    assert least_ms < ms < 1.6 * least_ms


@pytest.mark.parametrize("model", ["llama-3.1-70b", "gpt-oss-120b", "deepseek-v3"])
@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
def test_more_gpus_are_faster_but_not_in_proportion(model: str, gpu: str) -> None:
    few, many = time(model, 4, gpu), time(model, 8, gpu)
    for pair in (
        (few.predict_prefill_ms([8192]), many.predict_prefill_ms([8192])),
        (few.predict_decode_ms(64, 64_000), many.predict_decode_ms(64, 64_000)),
    ):
        assert pair[1] < pair[0] < 2.2 * pair[1]


def test_norms_over_all_heads_cost_an_all_reduce_where_several_gpus_share_them() -> None:
    each = model_shape.load_shape("qwen3-32b")
    whole = replace(each, norms_all_heads=True)
    for tensor in (1, 4):
        less, more = (
            composition.predict_element_wise_ms(shape, load(), tensor, np.array([1.0, 64.0]))
            for shape in (each, whole)
        )
        assert (more - less > 0.002).all() == (tensor > 1)
        assert (more - less < 0.010).all()


def test_windows_spare_decoding_long_contexts() -> None:
    config = dict(model_shape.known_models.CONFIGS["gpt-oss-120b"])
    whole = model_shape.from_config("whole", {**config, "sliding_window": None})
    built = composition.build_operators(whole, load(), 1)
    assert built is not None
    with_all = operator_fit.to_timing(built, 1).predict_decode_ms(64, 64 * 16384)
    assert time("gpt-oss-120b", 1).predict_decode_ms(64, 64 * 16384) < 0.85 * with_all


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_what_was_not_measured_is_left_to_the_roofline(quantization: dict[str, object]) -> None:
    config = dict(model_shape.known_models.CONFIGS["llama-3.1-8b"])
    shape = model_shape.from_config("m", {**config, "quantization_config": quantization})
    assert composition.build_operators(shape, load(), 1) is None


def test_unmeasured_sizes_are_left_to_the_roofline() -> None:
    assert build("deepseek-v3", 8, "A100-SXM-80GB") is None  # no 8-bit products
    assert build("gpt-oss-120b", 1, "A100-SXM-80GB") is None  # no heads of 64
    assert build("llama-3.1-70b", 16) is None  # no all-reduce over 16


def test_8_bits_are_faster_with_scales_of_rows_or_blocks() -> None:
    config = dict(model_shape.known_models.CONFIGS["qwen3-8b"])
    for more in ({}, {"weight_block_size": [128, 128]}):
        quantization = {"quant_method": "fp8", **more}
        shape = model_shape.from_config("m", {**config, "quantization_config": quantization})
        built = composition.build_operators(shape, load(), 1)
        assert built is not None
        ms = operator_fit.to_timing(built, 1).predict_prefill_ms([4096])
        assert ms < 0.8 * time("qwen3-8b", 1).predict_prefill_ms([4096])


def test_products_of_integers_are_not_priced_as_fp8() -> None:
    def quantize(kind: str) -> ModelShape:
        group = {
            "weights": {"num_bits": 8, "type": kind},
            "input_activations": {"num_bits": 8},
        }
        part = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        config = model_shape.known_models.CONFIGS["llama-3.1-8b"] | {"quantization_config": part}
        return model_shape.from_config("m", config)

    assert composition.build_operators(quantize("float"), load("H200"), 1) is not None
    assert composition.build_operators(quantize("int"), load("H200"), 1) is None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"])
@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
def test_kv_of_8_bits_is_read_faster(model: str, gpu: str) -> None:
    shape = model_shape.load_shape(model)
    wide, narrow = (
        composition.build_operators(each, load(gpu), 4)
        for each in (shape, shape.with_kv_dtype("fp8"))
    )
    assert wide is not None
    assert narrow is not None
    ms = [
        operator_fit.to_timing(each, 4).predict_decode_ms(64, 64 * 16384) for each in (wide, narrow)
    ]
    assert ms[1] < 0.98 * ms[0]


def test_kv_of_8_bits_on_a100_is_left_to_the_roofline() -> None:
    narrow = model_shape.load_shape("llama-3.1-8b").with_kv_dtype("fp8")
    assert composition.build_operators(narrow, load("A100-SXM-80GB"), 1) is None


def test_nvfp4_is_faster_than_8_bits_where_it_was_measured() -> None:
    def build_with(quantization: dict[str, str], gpu: str) -> EngineTiming | None:
        config = model_shape.known_models.CONFIGS["llama-3.1-70b"]
        shape = model_shape.from_config("m", {**config, "quantization_config": quantization})
        built = composition.build_operators(shape, load(gpu), 4)
        return operator_fit.to_timing(built, 4) if built else None

    narrow = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    four, eight = build_with(narrow, "B200"), build_with({"quant_method": "fp8"}, "B200")
    assert four is not None
    assert eight is not None
    assert four.predict_prefill_ms([8192]) < 0.8 * eight.predict_prefill_ms([8192])
    assert four.predict_decode_ms(16, 16_000) < eight.predict_decode_ms(16, 16_000)
    assert build_with(narrow, "H200") is None


@pytest.mark.parametrize("gpu", ["A100-SXM-80GB", "H100", "B200", "RTX-PRO-6000-Server"])
def test_every_known_model_has_times_or_none(gpu: str) -> None:
    tables = load(gpu)
    for model in known_models.CONFIGS:
        built = composition.build_operators(model_shape.load_shape(model), tables, 8)
        if built is not None:
            timing = operator_fit.to_timing(built, 8)
            assert 0 < timing.predict_decode_ms(1, 1) < timing.predict_prefill_ms([32_768]), model
