"""Heads of HTTP messages."""

import pytest

from cleave.gateway.http.headers import is_valid_request_id


@pytest.mark.parametrize("value", [b"a", b"AZaz09._:/+=@-", b"x" * 128])
def test_usual_ids_are_sane(value: bytes) -> None:
    assert is_valid_request_id(value)


@pytest.mark.parametrize("byte", [b" ", b"\r", b"\n", b"\0", b'"', b"<", b";", b"\x7f", b"\xff"])
@pytest.mark.parametrize("place", ["%b", "%bx", "x%b", "x%bx"])
def test_an_id_with_any_other_byte_is_not(byte: bytes, place: str) -> None:
    assert not is_valid_request_id(place.encode() % byte)


@pytest.mark.parametrize("value", [b"", b"x" * 129])
def test_nor_is_one_that_is_empty_or_too_long(value: bytes) -> None:
    assert not is_valid_request_id(value)
