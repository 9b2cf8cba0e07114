"""How a model's source is understood."""

import json

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


CONFIG = {"num_hidden_layers": 2, "quantization_config": {"ignore": ["lm_head"]}}


def test_a_config_is_an_object_or_an_entry_of_a_config_map() -> None:
    inline = ModelSpec.model_validate({"source": "org/new", "config": {"inline": CONFIG}})
    assert inline.config is not None
    # Names of Hugging Face, which Kubernetes' spelling does not concern.
    assert inline.config.inline == CONFIG
    nulls = {**CONFIG, "head_dim": None, "rope_scaling": {"factor": None, "list": [{"a": None}]}}
    stored = ModelSpec.model_validate({"source": "org/new", "config": {"inline": nulls}})
    assert stored.config is not None
    # Null removes a field in patches; false says the same about a model.
    scaling = {"factor": False, "list": [{"a": False}]}
    assert stored.config.inline == {**CONFIG, "head_dim": False, "rope_scaling": scaling}
    assert inline.shape_field == "spec.model.config.inline"
    reference = {"configMapKeyRef": {"name": "new-config"}}
    model = ModelSpec.model_validate({"source": "org/new", "config": reference}, by_alias=True)
    assert model.config is not None
    assert model.config.config_map_key_ref is not None
    assert model.config.config_map_key_ref.key == "config.json"
    assert model.shape_field == "spec.model.config.configMapKeyRef"
    assert ModelSpec(source="org/new").shape_field == "spec.model.source"


@pytest.mark.parametrize(
    "config", [{}, {"inline": CONFIG, "configMapKeyRef": {"name": "new-config"}}]
)
def test_exactly_one_of_them_is_given(config: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="exactly one of inline and configMapKeyRef"):
        ModelSpec.model_validate({"source": "org/new", "config": config}, by_alias=True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a":' * 900 + "1" + "}" * 900, "nested deeper than 32 levels"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "nested deeper than 32 levels"),
        (r'{"a": "\ud800"}', "no valid Unicode"),
        ('{"a": [NaN]}', "has NaN or an infinite number"),
        ('{"a": 1e400}', "has NaN or an infinite number"),
    ],
)
def test_a_config_that_cannot_be_written_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        ModelSpec.model_validate({"source": "org/new", "config": {"inline": json.loads(text)}})


def test_the_length_of_a_config_is_bounded_and_the_remedy_is_named() -> None:
    config = {"quantization_config": {"ignore": ["model.layers.0.mlp.gate"] * 3_000}}
    with pytest.raises(
        ValidationError, match=r"above 65,536.*spec\.model\.config\.configMapKeyRef"
    ):
        ModelSpec.model_validate({"source": "org/new", "config": {"inline": config}})
