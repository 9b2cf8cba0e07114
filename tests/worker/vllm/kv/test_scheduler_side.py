"""The scheduler's half of the KV connector, fed with requests as vLLM has them."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE = 4
PROMPT = list(range(10))


@pytest.fixture
def vllm_request() -> ModuleType:
    return pytest.importorskip("vllm.v1.request", reason="needs the group worker-cpu")


def side(boot_id: str) -> Any:
    from cleave_worker.transfer.sharding import ParallelShape
    from cleave_worker.vllm.kv.scheduler_side import SchedulerSide

    scheduler = SchedulerSide(boot_id, BLOCK_SIZE, ParallelShape(2, (0, 3)))
    scheduler.set_rank_addresses((("10.0.0.1", 5601),), "secret")
    return scheduler


def request_of(params: dict[str, Any] | None, **changed: object) -> Any:
    fields = {
        "request_id": "r",
        "kv_transfer_params": params,
        "prompt_token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "status": None,
    }
    return SimpleNamespace(**(fields | changed))


def blocks(count: int) -> list[Any]:
    return [SimpleNamespace(block_id=100 + number) for number in range(count)]


@pytest.fixture
def handed(vllm_request: ModuleType) -> dict[str, Any]:
    """What a prefill engine answers."""
    prefilled = request_of(
        {"do_remote_decode": True},
        status=vllm_request.RequestStatus.FINISHED_LENGTH_CAPPED,
    )
    is_delayed, params = side("boot-p").finish_request(prefilled, [7, 8, 9])
    assert is_delayed
    assert params
    return params


def test_ranks_hear_once_where_all_of_them_serve(vllm_request: ModuleType) -> None:
    prefill = side("boot-p")
    first = prefill.build_metadata()
    assert (first.addresses, first.prefix_secret) == ((("10.0.0.1", 5601),), "secret")
    assert prefill.build_metadata().addresses == ()


def test_a_handoff_says_all_that_the_gateway_and_the_reader_look_at(
    handed: dict[str, Any],
) -> None:
    own = handed.pop("cleave")
    assert own.pop("prompt_digest")
    assert own == {
        "boot_id": "boot-p",
        "request_id": "r",
        "epoch": 1,
        "num_tokens": 10,
        "addresses": (("10.0.0.1", 5601),),
        "shape": {"tensor_parallel_size": 2, "stages": (0, 3)},
        "key": "",
    }
    assert (handed["tp_size"], handed["pp_size"]) == (2, 2)
    assert handed["remote_block_ids"] == [[7, 8, 9]]
    assert (handed["remote_engine_id"], handed["remote_request_id"]) == ("boot-p", "r")
    assert (handed["remote_host"], handed["remote_port"]) == ("10.0.0.1", 5601)


def test_only_requested_whole_prompts_are_held(
    vllm_request: ModuleType,
) -> None:
    status = vllm_request.RequestStatus
    order = {"do_remote_decode": True}
    done = status.FINISHED_LENGTH_CAPPED
    for request, blocks_held in (
        (request_of(None, status=done), [7, 8, 9]),
        (request_of({"do_remote_decode": False}, status=done), [7, 8, 9]),
        (request_of(order, status=status.FINISHED_ABORTED), [7, 8, 9]),
        (request_of(order, status=done), [7, 8]),
        (request_of(order, status=done, prompt_token_ids=None), [7, 8, 9]),
    ):
        prefill = side("boot-p")
        assert prefill.finish_request(request, blocks_held) == (False, None)
        assert not prefill.build_metadata().finished_prefills


def test_what_the_prefix_cache_lacks_is_pulled_once(handed: dict[str, Any]) -> None:
    decode, request = side("boot-d"), request_of(handed)
    decode.on_new_request(request)
    assert list(decode.build_metadata().expected_pulls) == ["r"]
    assert decode.count_tokens_to_pull(request, 4) == 6
    decode.update_after_alloc(request, blocks(3), 6)
    pull = decode.build_metadata().pulls["r"]
    assert pull.first_block == 1
    assert pull.blocks == (101, 102)
    assert pull.prompt_digest == handed["cleave"]["prompt_digest"]
    assert pull.handoff.boot_id == "boot-p"
    # After a failed pull the prompt is computed here.
    assert decode.count_tokens_to_pull(request, 0) == 0
    decode.update_after_alloc(request, blocks(3), 0)
    assert decode.build_metadata().pulls == {}


def test_a_request_that_needs_nothing_or_ends_early_frees_the_owners_blocks(
    handed: dict[str, Any], vllm_request: ModuleType
) -> None:
    cached, aborted = side("boot-d"), side("boot-d")
    request = request_of(dict(handed))
    cached.on_new_request(request)
    cached.update_after_alloc(request, blocks(3), 0)
    assert list(cached.build_metadata().declined_pulls) == ["r"]

    request = request_of(dict(handed), status=vllm_request.RequestStatus.FINISHED_ABORTED)
    aborted.on_new_request(request)
    assert aborted.finish_request(request, []) == (False, None)
    assert list(aborted.build_metadata().declined_pulls) == ["r"]
    assert aborted.finish_request(request, []) == (False, None)
    assert not aborted.build_metadata().declined_pulls


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.pop("cleave"),
        lambda own: own["cleave"].pop("epoch"),
        lambda own: own.update(remote_engine_id="other"),
        lambda own: own.update(remote_request_id="other"),
        lambda own: own["cleave"].update(num_tokens=9),
    ],
)
def test_a_handoff_that_is_not_whole_is_computed_and_counted(
    handed: dict[str, Any], change: Any
) -> None:
    change(handed)
    decode, request = side("boot-d"), request_of(handed)
    decode.on_new_request(request)
    assert decode.count_tokens_to_pull(request, 0) == 0
    assert decode.take_stats().data["ended"] == {"malformed": 1}
    assert decode.take_stats().is_empty()


def test_every_input_of_the_kv_changes_the_digest(handed: dict[str, Any]) -> None:
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=2))
    digests = set()
    for changed in (
        {},
        {"prompt_token_ids": PROMPT[::-1]},
        {"cache_salt": "salt"},
        {"lora_request": SimpleNamespace(lora_name="sql")},
        {"mm_features": [image]},
    ):
        decode, request = side("boot-d"), request_of(dict(handed), **changed)
        decode.on_new_request(request)
        decode.update_after_alloc(request, blocks(3), 10)
        digests.add(decode.build_metadata().pulls["r"].prompt_digest)
    assert len(digests) == 5


AHEAD = {
    "do_remote_prefill": True,
    "remote_engine_id": "boot-p",
    "remote_request_id": "name",
    "cleave": {
        "boot_id": "boot-p",
        "request_id": "name",
        "epoch": 0,
        "prompt_digest": "",
        "num_tokens": 0,
        "addresses": [["10.0.0.1", 5601]],
    },
}


def test_an_overlapped_prompt_is_pulled_under_its_own_digest(
    vllm_request: ModuleType,
) -> None:
    prefilling = request_of({"do_remote_decode": True, "cleave": {"name": "name"}})
    prefill, decode = side("boot-p"), side("boot-d")
    prefill.on_new_request(prefilling)
    begun = prefill.build_metadata().started_prefills["r"]
    assert (begun.name, begun.num_blocks) == ("name", 3)
    request = request_of(dict(AHEAD))
    decode.on_new_request(request)
    decode.update_after_alloc(request, blocks(3), 10)
    pull = decode.build_metadata().pulls["r"]
    assert pull.handoff.is_overlapped
    assert pull.prompt_digest == begun.prompt_digest

    prefilling.status = vllm_request.RequestStatus.FINISHED_LENGTH_CAPPED
    is_delayed, params = prefill.finish_request(prefilling, [7, 8, 9])
    assert is_delayed
    assert params
    assert (
        prefill.build_metadata().finished_prefills["r"].epoch
        == begun.epoch
        == params["cleave"]["epoch"]
    )


def test_a_followed_prefill_that_was_aborted_or_preempted_is_not_held(
    vllm_request: ModuleType,
) -> None:
    status = vllm_request.RequestStatus
    for lost, ending, given_up in (
        (set(), status.FINISHED_ABORTED, {"r"}),
        ({"r"}, status.FINISHED_LENGTH_CAPPED, {"r"}),
    ):
        request = request_of({"do_remote_decode": True, "cleave": {"name": "name"}})
        prefill = side("boot-p")
        prefill.on_new_request(request)
        output = SimpleNamespace(
            preempted_req_ids=lost,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[]
            ),
            num_scheduled_tokens={},
        )
        first = prefill.build_metadata(output)
        request.status = ending
        assert prefill.finish_request(request, [7, 8, 9]) == (False, None)
        second = prefill.build_metadata()
        assert first.cancelled_prefills | second.cancelled_prefills == given_up
        assert not second.finished_prefills
