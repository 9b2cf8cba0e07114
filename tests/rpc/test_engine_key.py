"""Keys of engines."""

from cleave.rpc.engine_key import HEADER, build_headers, compute_kv_key, create_key


def test_each_key_is_new_and_fits_a_header() -> None:
    assert create_key() != create_key()
    assert len(create_key()) == 64
    assert create_key().isalnum()


def test_the_key_of_the_kv_port_does_not_show_that_of_the_api() -> None:
    key = create_key()
    assert compute_kv_key(key) == compute_kv_key(key)
    assert compute_kv_key(key) not in ("", key, compute_kv_key(create_key()))


def test_an_engine_without_a_key_asks_for_nothing() -> None:
    assert (compute_kv_key(""), build_headers("")) == ("", {})
    assert build_headers("k") == {HEADER: "k"}
