"""What `--host` and `--port` take."""

import argparse

import pytest

from cleave.rpc.listen_addresses import parse_hosts, parse_port


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
