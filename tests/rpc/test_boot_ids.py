"""Ids of the starts of engines."""

import re

from cleave.rpc.boot_ids import create_boot_id, is_boot_of


def test_an_id_shows_the_instance_that_it_was_made_for_and_no_other_one() -> None:
    boot_id = create_boot_id("chat-decode-0")
    assert re.fullmatch(r"[0-9a-f]{24}", boot_id)
    assert is_boot_of(boot_id, "chat-decode-0")
    assert not is_boot_of(boot_id, "chat-decode-1")
    assert not is_boot_of("first-boot", "chat-decode-0")
    assert not is_boot_of("", "chat-decode-0")


def test_vllm_may_append_the_rank_to_an_id() -> None:
    assert is_boot_of(create_boot_id("d-dp1") + "_dp1", "d-dp1")


def test_each_start_has_another_id() -> None:
    assert len({create_boot_id("d") for _ in range(100)}) == 100
