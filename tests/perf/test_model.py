"""Model descriptions from the table and from config.json."""

import json
from pathlib import Path

import pytest

from cleave.perf import model

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_opt_13b_is_described_with_and_without_its_owner() -> None:
    shape = model.load("facebook/opt-13b")
    assert shape == model.load("opt-13b")
    assert shape.kv_bytes_per_token == 2 * 40 * 5120 * 2
    assert shape.max_model_len == 2048


def test_grouped_query_attention_keeps_fewer_heads(tmp_path: Path) -> None:
    shape = model.load(write(tmp_path, LLAMA))
    assert shape.head_size == 128
    assert shape.kv_bytes_per_token == 131_072


def test_a_config_with_its_own_head_size_and_precision_is_followed(tmp_path: Path) -> None:
    config = {**LLAMA, "head_dim": 64, "dtype": "float32"}
    assert model.load(write(tmp_path, config)).kv_bytes_per_token == 2 * 32 * 8 * 64 * 4


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    assert model.load(write(tmp_path, {"text_config": LLAMA})).num_layers == 32


def test_an_unknown_name_is_refused_with_the_described_ones() -> None:
    with pytest.raises(model.UnknownModelError, match="opt-13b"):
        model.load("someone/else")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"num_attention_heads": 1}'])
def test_a_broken_config_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(model.UnknownModelError, match=r"config\.json"):
        model.load(str(tmp_path))


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model.UnknownModelError, match="int3"):
        model.load(write(tmp_path, {**LLAMA, "torch_dtype": "int3"}))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model.UnknownModelError, match="cannot be read"):
        model.load(str(tmp_path))
