import json
from pathlib import Path

import pytest

from cleave.local import tiny_model


@pytest.fixture(autouse=True)
def libraries() -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")


def test_every_token_that_the_model_knows_has_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tiny_model.build(tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    text = "Grüße, world 🌍"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_model_is_built_every_time(tmp_path: Path) -> None:
    for name in "ab":
        tiny_model.build(tmp_path / name)
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_cached_model_is_built_once_and_leaves_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEAVE_STATE_DIR", str(tmp_path))
    path = tiny_model.get_or_build()
    before = (path / "config.json").stat().st_mtime_ns
    assert tiny_model.get_or_build() == path
    assert (path / "config.json").stat().st_mtime_ns == before
    assert list(path.parent.iterdir()) == [path]


def test_a_second_builder_keeps_the_first_ones_model(tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "tiny")
    tiny_model.build(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_model_with_experts_is_a_mixtral(tmp_path: Path) -> None:
    from safetensors import safe_open

    tiny_model.build(tmp_path / "tiny", tiny_model.TinyModelShape(layers=1, experts=3))
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (3, 2)
    with safe_open(tmp_path / "tiny" / "model.safetensors", "np") as weights:
        mlp = [name for name in weights.keys() if "block_sparse_moe" in name]  # noqa: SIM118
        router = weights.get_slice("model.layers.0.block_sparse_moe.gate.weight")
        assert router.get_shape() == [3, config["hidden_size"]]
    assert len(mlp) == 1 + 3 * 3
