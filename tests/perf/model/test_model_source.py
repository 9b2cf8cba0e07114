"""Where a deployment's dimensions come from, and what is said when there are none."""

import json
from pathlib import Path

import pytest

from cleave.api.model import ModelSpec
from cleave.perf.model import model_shape, model_source
from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_shape import UnknownModelError

TINY = {**CONFIGS["llama-3.1-8b"], "num_hidden_layers": 4}


def model(source: str = "org/new-4", **config: object) -> ModelSpec:
    document = {"source": source, "config": config} if config else {"source": source}
    return ModelSpec.model_validate(document, by_alias=True)


def test_an_inline_config_has_the_dimensions_of_any_source() -> None:
    for source, name in [("org/new-4", "new-4"), ("/models/new-4", "new-4"), ("hf://o/m", "m")]:
        shape = model_source.load_known_shape(model(source, inline=TINY))
        assert (shape.name, shape.num_layers) == (name, 4)


def test_the_type_of_numbers_counts_for_every_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for each in (model(inline=TINY), model(str(tmp_path)), model("meta-llama/Llama-3.1-8B")):
        wide = each.model_copy(update={"dtype": "float32"})
        shape = model_source.load_shape(each)
        assert model_source.load_shape(wide).weight_bytes == 2 * shape.weight_bytes


def test_a_known_name_keeps_its_name_so_that_published_times_are_found() -> None:
    shape = model_source.load_shape(model("meta-llama/Llama-3.1-8B-Instruct", inline=TINY))
    assert (shape.name, shape.num_layers) == ("llama-3.1-8b", 4)


def test_a_config_is_preferred_to_a_folders_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    assert model_source.load_shape(model(str(tmp_path))).num_layers == 32
    assert model_source.load_shape(model(str(tmp_path), inline=TINY)).num_layers == 4
    with pytest.raises(UnknownModelError, match="folder, which the operator does not read"):
        model_source.load_known_shape(model(str(tmp_path)))


def test_a_config_map_is_not_read_outside_of_a_cluster() -> None:
    with pytest.raises(UnknownModelError, match=r"ConfigMap new .*spec\.model\.config\.inline"):
        model_source.load_shape(model(configMapKeyRef={"name": "new"}))


def test_a_fault_names_the_field_its_value_and_the_remedy() -> None:
    wrong = {**TINY, "num_attention_heads": "32"}
    assert model_source.find_config_fault(model(inline=wrong)) == (
        "spec.model.config.inline: new-4: num_attention_heads is '32'; write a whole number of at "
        "least 1"
    )
    assert model_source.find_config_fault(model(inline=TINY)) is None
    assert model_source.find_config_fault(model()) is None


def test_the_content_of_a_config_map_takes_the_place_of_the_reference() -> None:
    declared = model(configMapKeyRef={"name": "new", "key": "c"})
    read = model_source.with_config_map(declared, {"c": json.dumps(TINY, indent=2)})
    assert read.config is not None
    assert read.config.inline == TINY
    assert model_source.load_shape(read).num_layers == 4
    assert model_source.with_config_map(model(), {}) == model()


def test_a_config_map_may_hold_the_quantisation_in_an_entry_of_its_own() -> None:
    quantization = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    data = {"config.json": json.dumps(TINY), "hf_quant_config.json": json.dumps(quantization)}
    declared = model(configMapKeyRef={"name": "new"})
    read = model_source.load_shape(model_source.with_config_map(declared, data))
    assert read.bytes_per_weight == 1
    with pytest.raises(ModelConfigError, match=r"ConfigMap new, key hf_quant_config\.json: is no"):
        model_source.with_config_map(declared, {**data, "hf_quant_config.json": "{"})


def test_long_lists_of_layers_in_a_config_map_are_shortened() -> None:
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(4_000)]
    config = {**TINY, "quantization_config": {"quant_method": "fp8", "ignored_layers": names}}
    data = {"config.json": json.dumps(config)}
    read = model_source.with_config_map(model(configMapKeyRef={"name": "new"}), data)
    assert read.config is not None
    assert read.config.inline is not None
    assert len(json.dumps(read.config.inline)) < 1_000


def test_infinite_numbers_that_hugging_faces_library_writes_are_left_out() -> None:
    text = json.dumps({**TINY, "time_step_max": float("inf"), "limit": [0.0, float("inf")]})
    read = model_source.with_config_map(
        model(configMapKeyRef={"name": "new"}), {"config.json": text}
    )
    assert read.config is not None
    assert read.config.inline == {**TINY, "time_step_max": False, "limit": [0.0, None]}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({}, "ConfigMap new has no key config.json; add it"),
        ({"a": "", "b": ""}, "ConfigMap new has no key config.json; add it"),
        ({"config.json": "{"}, "ConfigMap new, key config.json: is no JSON"),
        ({"config.json": "[]"}, "ConfigMap new, key config.json: must be an object"),
        ({"config.json": "[" * 100_000}, "ConfigMap new, key config.json: is nested too deeply"),
        ({"config.json": "{}"}, "model_type is missing; add it"),
        ({"config.json": " " * 300_000}, "has 300,000 characters; a config.json is shorter"),
        ({"config.json": json.dumps({"x": "y" * 70_000})}, "above 65,536"),
    ],
)
def test_what_is_wrong_with_a_config_map_names_it_and_its_key(
    data: dict[str, str], fault: str
) -> None:
    with pytest.raises(ModelConfigError) as raised:
        model_source.with_config_map(model(configMapKeyRef={"name": "new"}), data)
    assert fault in str(raised.value)
    assert str(raised.value).startswith("ConfigMap new")


def test_a_config_describes_the_same_shape_as_a_file(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        inline = model_source.load_shape(model(f"/models/{tmp_path.name}", inline=dict(config)))
        assert inline == model_shape.load_shape(str(tmp_path)), name


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        (model("org/new-4"), True),
        (model("/models/new-4"), True),
        (model("meta-llama/Llama-3.1-8B"), False),
        (model("org/new-4", inline=TINY), False),
        (model("org/new-4", configMapKeyRef={"name": "new"}), False),
    ],
)
def test_an_engine_is_needed_only_where_nothing_else_knows_the_model(
    spec: ModelSpec, needs: bool
) -> None:
    assert model_source.needs_report(spec) is needs


def test_a_reported_config_counts_as_an_inline_one() -> None:
    reported = model_source.with_config(model(), TINY)
    assert reported == model(inline=TINY)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"hidden_size": 1}, "model_type is missing"),
        ({**TINY, "vocab_size": 10**12}, "write a number up to"),
        ({"model_type": "llava", "text_config": {"text_config": {"a": 1}}}, "keep one of both"),
        ({"a": "x" * 100_000}, "above 65,536"),
    ],
)
def test_a_hostile_report_is_refused_like_a_config(config: dict, fault: str) -> None:
    with pytest.raises(ModelConfigError, match=fault):
        model_source.with_config(model(), config)
