"""Arguments of engines are read as argparse and vLLM read them."""

import pytest

from cleave_worker.agent.weights.engine_arguments import (
    get_option,
    get_settings,
    get_values,
    remove_option,
)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--revision", "v1"], "v1"),
        (["--revision=v1"], "v1"),
        (["--revision", "v1", "--x", "--revision=v2"], "v2"),
        (["--code-revision", "v1"], None),
        (["--revision"], None),
        (["--x=--revision", "v1"], None),
        ([], None),
    ],
)
def test_the_last_of_several_counts(arguments: list[str], value: str | None) -> None:
    assert get_option(arguments, "--revision") == value


def test_an_underscore_in_a_name_is_a_dash_and_in_a_value_is_none() -> None:
    arguments = ["--tokenizer_revision=a_b", "--lora_modules", "x_y=/a_b", "z=/c", "--seed", "1"]
    assert get_option(arguments, "--tokenizer-revision") == "a_b"
    assert get_values(arguments, "--lora-modules") == ["x_y=/a_b", "z=/c"]
    assert remove_option(arguments, "--tokenizer-revision") == arguments[1:]


def test_all_of_an_option_are_removed_and_nothing_else() -> None:
    arguments = ["--revision", "v1", "--seed", "1", "--revision=v2", "x"]
    assert remove_option(arguments, "--revision") == ["--seed", "1", "x"]
    assert remove_option(arguments, "--none") == arguments


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--speculative-config", '{"model": "/d"}'], {"model": "/d"}),
        (["-sc={}", "-sc", '{"model": "/d"}'], {"model": "/d"}),
        # vLLM adds what it has in parts at the end.
        (["-sc.model", "/d", "-sc", '{"model": "/e"}'], {"model": "/d"}),
        (["--speculative_config.a_b.c=1", "-s.a_b.d", "x"], {"a_b": {"c": 1, "d": "x"}}),
        (["-sc.a=1", "-sc.a.b", "2"], {"a": 1}),
        (["-sc", "[1]"], {}),
        (["-sc", "{"], {}),
        (["--speculative-configs.model", "/d"], {}),
    ],
)
def test_an_object_is_given_as_json_or_in_parts(
    arguments: list[str], settings: dict[str, object]
) -> None:
    assert get_settings(arguments, "--speculative-config") == settings


def test_an_option_with_one_dash_ends_the_values_of_another_and_a_number_does_not() -> None:
    arguments = ["--lora-modules", "a=/a", "-1", "-.5", "-tp", "2"]
    assert get_values(arguments, "--lora-modules") == ["a=/a", "-1", "-.5"]
