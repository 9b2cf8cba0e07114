"""Operators of a pass, from shapes."""

import pytest

from cleave.perf.model import model_shape
from cleave.perf.roofline import operators

ROWS = 256


def flops(shape: model_shape.ModelShape, tensor: int) -> float:
    products = operators.iter_matrix_products(shape, tensor, ROWS)
    return sum(product.count * product.flops for product in products)


@pytest.mark.parametrize(
    "name", ["opt-13b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v3"]
)
def test_all_linear_layers_together_have_the_models_flops(name: str) -> None:
    shape = model_shape.load_shape(name)
    assert flops(shape, 1) == pytest.approx(shape.flops_per_token * ROWS, rel=1e-3)


def test_tensor_parallel_gpus_share_the_flops() -> None:
    shape = model_shape.load_shape("llama-3.1-70b")
    assert flops(shape, 8) == pytest.approx(flops(shape, 1) / 8, rel=1e-6)


@pytest.mark.parametrize("name", ["opt-13b", "llama-3.1-8b"])
def test_one_row_reads_every_weight_once(name: str) -> None:
    shape = model_shape.load_shape(name)
    products = [*operators.iter_matrix_products(shape, 1, 1), operators.build_lm_head(shape, 1, 1)]
    read = sum(product.count * product.size_bytes for product in products)
    embedding = 0 if shape.has_tied_embeddings else shape.embedding_parameters * shape.dtype_bytes
    assert read == pytest.approx(shape.weight_bytes - embedding, rel=0.01)


def test_few_rows_read_few_experts_and_many_read_all() -> None:
    shape = model_shape.load_shape("mixtral-8x7b")

    def read(rows: float) -> float:
        return sum(
            product.size_bytes
            for product in operators.iter_matrix_products(shape, 1, rows)
            if product.name == "experts"
        )

    one_expert = shape.count_mlp_parameters(14336) * 2
    assert read(1) == pytest.approx(2 * one_expert, rel=0.01)
    assert read(64) == pytest.approx(8 * one_expert, rel=0.05)


def test_attention_of_a_prompt_is_causal() -> None:
    shape = model_shape.load_shape("opt-13b")
    # Scores and values: 2 FLOPs each for every pair and number, half of the pairs.
    per_square = 2 * 2 * shape.hidden_size * shape.num_layers / 2
    assert operators.build_attention(shape, 1).prompt_flops_per_square == per_square
    assert operators.build_attention(shape, 4).prompt_flops_per_square == per_square / 4


def test_decoding_reads_the_kv_cache_and_replicated_heads_everywhere() -> None:
    shape = model_shape.load_shape("llama-3.1-8b")
    read = [operators.build_attention(shape, n).decode_bytes_per_context_token for n in (1, 8, 16)]
    assert read == [131_072, 16_384, 16_384]


def test_quantised_weights_are_read_in_fewer_bytes() -> None:
    whole = model_shape.load_shape("llama-3.1-8b")
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    }
    small = model_shape.from_config("llama-fp8", config)
    sizes = [
        sum(p.count * p.size_bytes for p in operators.iter_matrix_products(shape, 1, 1))
        for shape in (small, whole)
    ]
    assert sizes[0] == pytest.approx(sizes[1] / 2, rel=0.01)
