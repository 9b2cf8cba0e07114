import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.local.smollm2 import conversion
from cleave.local.smollm2.gguf import GgufFile

from tests.support import gguf

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def model() -> GgufFile:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return GgufFile(gguf.make_model([*letters, "he", "\u0120he"], ["h e", "\u0120 he"]))


@pytest.fixture(scope="module")
def folder(model: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    conversion.write(path, model)
    return path


def test_the_config_is_that_of_a_llama_with_its_embeddings_tied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, 1)
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (32, 1e-5, 1e5)
    assert config["tie_word_embeddings"]
    ends = json.loads((folder / "generation_config.json").read_text())
    assert ends == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_weights_are_those_of_the_file_with_rotated_pairs_apart(
    folder: Path, model: GgufFile
) -> None:
    import numpy as np
    from safetensors import safe_open

    given = {name: weights.astype(np.float16) for name, weights in model.iter_tensors()}
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(found) == len(given)
    layer = "model.layers.0"
    assert (found["model.embed_tokens.weight"] == given["token_embd.weight"]).all()
    assert (found[f"{layer}.mlp.down_proj.weight"] == given["blk.0.ffn_down.weight"]).all()
    assert (found[f"{layer}.self_attn.v_proj.weight"] == given["blk.0.attn_v.weight"]).all()
    # llama.cpp puts row i of a head beside row i + size / 2: positions 2i and 2i + 1.
    for name, letter, heads in (("q_proj", "q", 2), ("k_proj", "k", 1)):
        restored = found[f"{layer}.self_attn.{name}.weight"].reshape(heads, 2, 16, -1)
        theirs = given[f"blk.0.attn_{letter}.weight"].reshape(heads, 16, 2, -1)
        for pair in range(16):
            assert (restored[:, :, pair] == theirs[:, pair]).all()


@given(st.text())
def test_every_text_comes_back_from_its_tokens(folder: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = tokenizer.encode(text).ids
    assert tokenizer.decode(numbers, skip_special_tokens=False) == text


def test_words_digits_and_control_tokens_are_cut_as_the_model_has_learned(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>he he 20<|im_end|>"
    assert tokenizer.encode(text).tokens == [
        "<|im_start|>", "he", "\u0120he", "\u0120", "2", "0", "<|im_end|>",
    ]  # fmt: skip
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages[0].content }}"
    names = [settings[f"{name}_token"] for name in ("bos", "eos", "unk", "pad")]
    assert names == ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>"]
