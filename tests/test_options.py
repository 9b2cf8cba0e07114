"""Options that are declared once, and what their values may be."""

import argparse
from dataclasses import dataclass

import pytest

from cleave.options import (
    add_options,
    declare,
    declare_each,
    declare_seconds,
    parse_hosts,
    parse_port,
    parse_size,
    read_options,
)


def test_hosts_are_separated_by_commas() -> None:
    assert parse_hosts("10.0.0.7") == ("10.0.0.7",)
    assert parse_hosts("fd00::7, 127.0.0.1") == ("fd00::7", "127.0.0.1")


@pytest.mark.parametrize("text", ["", ",127.0.0.1", "127.0.0.1,"])
def test_an_empty_address_is_refused_not_listened_on_everywhere(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="empty address"):
        parse_hosts(text)


def test_ports_have_16_bits() -> None:
    assert [parse_port("0"), parse_port("65535")] == [0, 65535]


@pytest.mark.parametrize("text", ["65536", "99999999", "-1", "http", "", "8e3"])
def test_another_number_is_no_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be from 0 to 65535"):
        parse_port(text)


@pytest.mark.parametrize(
    ("text", "size"), [("16MiB", 16 << 20), ("512Ki", 512 << 10), ("1000", 1000), ("1GiB", 1 << 30)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "16MB", "-1", "1.5Gi"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="size"):
        parse_size(text)


@dataclass(frozen=True)
class Settings:
    model: str = declare("--model", help_text="its name", env="MODEL")
    port: int = declare("--port", 80, "a port", env="PORT")
    names: tuple[str, ...] = declare_each("--name", "a name")
    wait_s: float = declare_seconds("--wait", 2.5, "a time")
    is_plain: bool = declare("--plain", False)
    text: str = "unseen"


def parse(line: str, **env: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings, env=env)
    return read_options(Settings, parser.parse_args(line.split()), text="other")


def test_a_dataclass_is_what_its_flags_say_and_else_its_defaults() -> None:
    assert parse("--model m") == Settings("m", text="other")
    full = "--model m --port 9 --name a --name b --wait 3 --plain"
    assert parse(full) == Settings("m", 9, ("a", "b"), 3.0, True, "other")


def test_a_variable_of_the_environment_is_another_default() -> None:
    assert parse("--model m", PORT="81").port == 81
    assert parse("--model m --port 9", PORT="81").port == 9
    assert parse("", MODEL="m").model == "m"
    assert parse("--model m", PORT="").port == 80


@pytest.mark.parametrize("line", ["", "--model m --port x", "--model m --wait -1"])
def test_what_a_field_cannot_be_is_bad_usage(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
