"""How a model's source is understood."""

import pytest
from pydantic import ValidationError

from cleave.api.model import ModelSpec


@pytest.mark.parametrize(
    ("source", "locator", "name", "folder"),
    [
        ("org/Model-1.5_b", "org/Model-1.5_b", "org/Model-1.5_b", None),
        ("hf://org/model", "org/model", "org/model", None),
        ("gpt2", "gpt2", "gpt2", None),
        ("/models/llama 3/8b", "/models/llama 3/8b", "8b", "/models/llama 3/8b"),
        ("/models/llama/", "/models/llama/", "llama", "/models/llama/"),
    ],
)
def test_a_source_is_an_id_or_a_folder(
    source: str, locator: str, name: str, folder: str | None
) -> None:
    model = ModelSpec(source=source)
    assert (model.locator, model.name, model.folder) == (locator, name, folder)


@pytest.mark.parametrize(
    "source",
    ["", "s3://a/b", "pvc://claim/path", "models/a/b", "./model", "../model", "-x", "--port", "a b",
     "org/", "hf://", "hf:///abs", "/", "/a:b", "/a\nb", "org/model\n"],
)  # fmt: skip
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(ValidationError, match="Hugging Face id"):
        ModelSpec(source=source)


def test_a_served_name_wins_over_the_source() -> None:
    assert ModelSpec(source="/models/llama", served_name="chat").name == "chat"
