"""What vLLM's processes import is left out of garbage collection."""

import gc

import pytest

from cleave_worker.vllm.frozen_imports import freeze_imports


def test_nothing_is_collected_in_the_block_and_what_it_made_is_left_alone_later() -> None:
    before = gc.get_freeze_count()
    with freeze_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_garbage_collection_comes_back_when_an_import_fails() -> None:
    with pytest.raises(ImportError), freeze_imports():
        raise ImportError
    assert gc.isenabled()
