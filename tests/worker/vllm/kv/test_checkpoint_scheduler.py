"""Which blocks are copied and restored, with requests as vLLM has them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
SIZE = 4
BLOCKS = [SimpleNamespace(block_id=100 + number) for number in range(1000)]


class Shelf:
    """What has been saved, by whomever."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def contains(self, key: str) -> bool:
        return key in self.keys


@pytest.fixture
def shelf() -> Shelf:
    pytest.importorskip("vllm.v1.request", reason="needs the group worker-cpu")
    return Shelf()


def keeper_of(shelf: Shelf, identity: str = "m") -> Any:
    from cleave_worker.vllm.kv.checkpoint_scheduler import CheckpointScheduler

    return CheckpointScheduler(identity, SIZE, shelf.contains)


def request_of(name: str, tokens: int, status: str = "RUNNING", **changed: object) -> Any:
    from vllm.v1.request import RequestStatus

    fields = {
        "request_id": name,
        "kv_transfer_params": None,
        "prompt_token_ids": list(range(tokens)),
        "all_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "status": RequestStatus[status],
    }
    return SimpleNamespace(**(fields | changed))


def block_ids(_: str) -> list[int]:
    return [block.block_id for block in BLOCKS]


def step(keeper: Any) -> Any:
    return keeper.build_metadata(block_ids)


def finish_stored(keeper: Any, shelf: Shelf, request: Any) -> list[int]:
    """Let a request run, save what is ordered, and return the blocks."""
    keeper.update_after_alloc(request, BLOCKS, 0)
    request.num_computed_tokens = request.num_tokens
    orders = step(keeper)
    shelf.keys |= orders.save.keys()
    return list(orders.save.values())


def restored(keeper: Any, request: Any, computed: int = 0) -> Any:
    count = keeper.count_restorable_tokens(request, computed)
    keeper.update_after_alloc(request, BLOCKS, count)
    return step(keeper).restore.get(request.request_id)


def test_full_blocks_are_saved_once_and_only_when_they_are_computed_and_known(
    shelf: Shelf,
) -> None:
    keeper, request = keeper_of(shelf), request_of("r", 10)
    keeper.update_after_alloc(request, BLOCKS, 0)
    assert not step(keeper).save, "this step computes it"
    request.num_computed_tokens = 10
    assert list(step(keeper).save.values()) == [100, 101]
    assert not step(keeper).save
    # A step is under way whose token is unknown yet.
    request.num_computed_tokens = 12
    request.all_token_ids += [10]
    request.num_tokens = 11
    assert not step(keeper).save
    request.all_token_ids += [11]
    request.num_tokens = 12
    assert list(step(keeper).save.values()) == [102]


@pytest.mark.parametrize("status", ["WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS"])
def test_what_does_not_run_is_not_copied(shelf: Shelf, status: str) -> None:
    keeper, request = keeper_of(shelf), request_of("r", 10, num_computed_tokens=10, status=status)
    keeper.update_after_alloc(request, BLOCKS, 0)
    assert not step(keeper).save


def test_prompts_for_other_engines_and_without_tokens_are_not_stored(shelf: Shelf) -> None:
    handed = request_of("r", 10, kv_transfer_params={"do_remote_decode": True})
    assert not finish_stored(keeper_of(shelf), shelf, handed)
    assert not finish_stored(keeper_of(shelf), shelf, request_of("e", 10, prompt_token_ids=None))


def test_no_step_copies_more_than_a_few_blocks(shelf: Shelf) -> None:
    from cleave_worker.vllm.kv.checkpoint_scheduler import MAX_BLOCKS_PER_STEP

    keeper = keeper_of(shelf)
    request = request_of("r", (MAX_BLOCKS_PER_STEP + 3) * SIZE)
    assert len(finish_stored(keeper, shelf, request)) == MAX_BLOCKS_PER_STEP
    assert list(step(keeper).save.values()) == [
        100 + MAX_BLOCKS_PER_STEP + more for more in range(3)
    ]
    assert not step(keeper).save


def test_another_engine_restores_all_but_the_last_token(shelf: Shelf) -> None:
    finish_stored(keeper_of(shelf), shelf, request_of("lost", 12))
    for tokens, blocks in ((12, 2), (13, 3), (40, 3), (3, 0)):
        found = restored(keeper_of(shelf), request_of("r", tokens))
        assert (len(found.blocks) if found else 0) == blocks, tokens


def test_what_is_cached_here_is_not_restored(shelf: Shelf) -> None:
    finish_stored(keeper_of(shelf), shelf, request_of("lost", 12))
    found = restored(keeper_of(shelf), request_of("r", 20), computed=2 * SIZE)
    assert found is not None
    assert found.blocks == (102,)


def test_only_the_blocks_that_the_engine_waits_for_are_filled(shelf: Shelf) -> None:
    finish_stored(keeper_of(shelf), shelf, request_of("lost", 12))
    keeper, request = keeper_of(shelf), request_of("r", 20)
    assert keeper.count_restorable_tokens(request, 0) == 12
    keeper.update_after_alloc(request, BLOCKS, 8)
    assert step(keeper).restore["r"].blocks == (100, 101)


@pytest.mark.parametrize(
    "changed",
    [
        {"cache_salt": "another"},
        {"lora_request": SimpleNamespace(lora_name="another")},
        {"mm_features": [SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=1))]},
        {"all_token_ids": [7, *range(1, 20)]},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"prompt_token_ids": None},
    ],
    ids=str,
)
def test_kv_of_anything_else_is_not_restored(shelf: Shelf, changed: dict[str, Any]) -> None:
    finish_stored(keeper_of(shelf), shelf, request_of("lost", 12))
    assert restored(keeper_of(shelf), request_of("r", 20, **changed)) is None
    assert restored(keeper_of(shelf, "another model"), request_of("r", 20)) is None


def test_a_request_is_restored_once_so_that_a_refusal_ends_in_computing(shelf: Shelf) -> None:
    finish_stored(keeper_of(shelf), shelf, request_of("lost", 12))
    keeper, request = keeper_of(shelf), request_of("r", 20)
    assert restored(keeper, request) is not None
    assert restored(keeper, request) is None


def test_the_end_of_a_stream_drops_what_no_other_stream_has(shelf: Shelf) -> None:
    keeper = keeper_of(shelf)
    first, second = request_of("a", 12), request_of("b", 8)
    finish_stored(keeper, shelf, first)
    finish_stored(keeper, shelf, second)
    keeper.finish_request(first)
    assert len(step(keeper).drop) == 1
    keeper.finish_request(second)
    assert len(step(keeper).drop) == 2
    keeper.finish_request(second)
    assert not step(keeper).drop
