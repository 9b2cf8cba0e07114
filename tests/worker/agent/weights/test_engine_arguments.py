"""Arguments of engines are read as argparse and vLLM read them."""

import pytest

from cleave_worker.agent.weights.engine_arguments import get_option, get_values, remove_option


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
