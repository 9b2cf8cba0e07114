"""Names of layers in lists: by number, by glob, by expression, and shortened."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.model.name_patterns import Matching, NamePatterns, WeightModule, shorten_names


def module(layer: int, *names: str) -> WeightModule:
    return WeightModule(layer, names, 1.0)


QUERY = "self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "matching", "layers"),
    [
        ("model.layers.3.self_attn.q_proj", Matching.EXACT, {3}),
        ("language_model.model.layers.3.self_attn.q_proj", Matching.EXACT, {3}),
        ("model.layers.3.self_attn", Matching.EXACT, set()),
        ("model.layers.3.self_attn", Matching.SUBSTRING, {3}),
        ("self_attn", Matching.SUBSTRING, {0, 1, 3, 10}),
        ("model.layers.3.self_attn*", Matching.GLOB, {3}),
        ("model.layers.3.self*proj", Matching.GLOB, {3}),
        ("model.layers.3.mlp*", Matching.GLOB, set()),
        ("model.layers.*.self_attn*", Matching.GLOB, {0, 1, 3, 10}),
        ("model.layers.1.*", Matching.GLOB, {1}),
        # vLLM looks for `model.layers.1` in names.
        ("model.layers.1*", Matching.GLOB, {1, 10}),
        ("mtp.layers.0*", Matching.GLOB, set()),
        ("model.visual.layers.0*", Matching.GLOB, set()),
        ("model.layers.0-1,10.self_attn.q_proj", Matching.EXACT, {0, 1, 10}),
        ("layers.3.self_attn", Matching.PARENT, {3}),
        ("layers.3.self_attn.q_proj", Matching.PARENT, {3}),
        ("re:.*self_attn.*", Matching.REGEX, {0, 1, 3, 10}),
        (r"re:.*self_attn\.(q|q_a|k)_proj.*", Matching.REGEX, {0, 1, 3, 10}),
        ("re:.*language_model.*self_attn.*", Matching.REGEX, {0, 1, 3, 10}),
        (r"re:.*layers\.(1|3)\..*q_proj", Matching.REGEX, {1, 3}),
        (r"re:.*layers\.\d+\.self_attn\.(q|k)_proj$", Matching.REGEX, {0, 1, 3, 10}),
        ("re:self_attn", Matching.REGEX, set()),
        ("re:.*self_attn.*", Matching.EXACT, set()),
    ],
)
def test_a_name_means_some_layers(pattern: str, matching: Matching, layers: set[int]) -> None:
    names = NamePatterns("ignore", [pattern], matching)
    assert {each for each in (0, 1, 3, 10) if names.matches(module(each, QUERY))} == layers


def test_a_name_that_no_layer_has_is_found() -> None:
    listed = ["lm_head", "model.layers.1.mlp.gate", "model.layers.99.mlp", "model.visual*"]
    names = NamePatterns("ignore", [*listed, "model.layers.1.wavelets"], Matching.GLOB)
    assert not names.matches(module(1, QUERY))
    assert names.find_unused(10) == "model.layers.1.wavelets"
    assert NamePatterns("ignore", listed, Matching.GLOB).find_unused(10) is None


@pytest.mark.parametrize(
    "expression",
    [
        *("re:(a+)+$", "re:.*(.*)*x", "re:a{1,9}", "re:(", "re:[a", "re:(?=x)"),
        *("re:" + part * 20 + "Z" for part in ("(.)?", "(a)?", "(a|ab)", "(a|)", "[a-z_]+")),
    ],
)
def test_expressions_that_texts_can_make_slow_are_refused(expression: str) -> None:
    with pytest.raises(ModelConfigError, match=r"q.ignore has 're:.*plans know names"):
        NamePatterns("q.ignore", [expression], Matching.REGEX)


def test_many_pieces_of_an_expression_take_no_time() -> None:
    names = NamePatterns("ignore", ["re:" + ".*a" * 60 + ".*b"], Matching.REGEX)
    began = time.process_time()
    for layer in range(100):
        assert not names.matches(module(layer, "a" * 60))
    assert time.process_time() - began < 5


def compare_all(listed: list[str], matching: Matching) -> None:
    names = NamePatterns("ignore", listed, matching)
    for layer in range(61):
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"):
            names.matches(module(layer, name))


@pytest.mark.parametrize(
    ("listed", "matching"),
    [
        ([f"re:.*[0-9]x{i}" for i in range(2000)], Matching.REGEX),
        ([f"*.{i}.*gate_*x" for i in range(2000)], Matching.GLOB),
        ([f"layers.0-9999.x{i}" for i in range(2000)], Matching.EXACT),
        (["layers." + ",".join(["0-9999"] * 2000) + ".x"], Matching.EXACT),
        ([f"layers.0-60.x{i}" for i in range(2000)], Matching.SUBSTRING),
    ],
)
def test_lists_that_are_too_long_to_be_compared_are_refused(
    listed: list[str], matching: Matching
) -> None:
    began = time.process_time()
    with pytest.raises(ModelConfigError, match="ignore has too many names to compare"):
        compare_all(listed, matching)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([f"model.layers.{i}.mlp.gate" for i in range(94)], ["model.layers.0-93.mlp.gate"]),
        (
            ["layers.1.a", "layers.2.a", "layers.5.a", "layers.2.b"],
            ["layers.1-2,5.a", "layers.2.b"],
        ),
        ([f"layers.0.experts.{i}.up" for i in range(512)], ["layers.0.experts.0.up"]),
        (["lm_head", "layers.1*", "layers.2*"], ["lm_head", "layers.1*", "layers.2*"]),
        (["re:.*layers.1.a", "re:.*layers.2.a"], ["re:.*layers.1.a", "re:.*layers.2.a"]),
    ],
)
def test_names_of_many_layers_become_one(names: list[str], short: list[str]) -> None:
    assert shorten_names(names) == short
    assert shorten_names(short) == short


PARTS = st.sampled_from(["self_attn.q_proj", "self_attn*", "mlp.gate", "mlp.experts.7.up", "*"])
NAMES = st.lists(st.tuples(st.integers(0, 12), PARTS, st.sampled_from([".", ""])), max_size=30)


@given(NAMES, st.sampled_from([Matching.GLOB, Matching.EXACT, Matching.PARENT]))
def test_shortened_lists_mean_the_same_layers(
    listed: list[tuple[int, str, str]], matching: Matching
) -> None:
    full = [f"model.layers.{i}{dot if part == '*' else '.'}{part}" for i, part, dot in listed]
    lists = [NamePatterns("a", each, matching) for each in (full, shorten_names(full))]
    for layer in range(13):
        for name in ("self_attn.q_proj", "mlp.gate", "mlp.experts", "mlp.experts.0.up"):
            found = {each.matches(module(layer, name)) for each in lists}
            if "experts.0" not in name:
                assert len(found) == 1, (full, layer, name)
