"""What agents say, and stop saying, and what that opens and closes."""

import math

import pytest

from cleave.router.errors import NoInstance
from cleave.router.instance import Connectivity
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2


def open_names(registry) -> set[str]:
    return {name for name, instance in registry.instances.items() if instance.selectable}


def test_two_seconds_of_silence_raise_doubt_ten_close_and_a_report_opens_again(
    registry, make_event, loaded
) -> None:
    registry.on_event("a", make_event("d", "decode"), 10.0)
    instance = registry.instances["d"]
    seen = []
    for now in (11.9, 12.1, 19.9, 20.1):
        registry.update_connectivity(now)
        seen.append((instance.connectivity, instance.selectable))
    assert seen == [
        (Connectivity.FRESH, True),
        (Connectivity.STALE, True),
        (Connectivity.STALE, True),
        (Connectivity.UNRESPONSIVE, False),
    ]
    registry.on_event("a", loaded("d"), 20.2)
    assert (instance.connectivity, instance.selectable) == (Connectivity.FRESH, True)


def test_a_report_ends_the_doubt(registry, make_event, loaded) -> None:
    registry.on_event("a", make_event("d1", "decode"), 10.0)
    registry.on_event("b", make_event("d2", "decode"), 13.0)
    registry.update_connectivity(13.0)
    router = Router(registry)
    assert [router.pick("m", 10).decode.instance for _ in range(3)] == ["d2"] * 3
    registry.on_event("a", loaded("d1"), 13.1)
    assert router.pick("m", 10).decode.instance == "d1"


@pytest.mark.parametrize(
    ("running", "seconds", "still"), [(1, 11, True), (1, 9, False), (0, 11, False)]
)
def test_an_engine_stood_still_that_made_no_step_with_requests(
    registry, make_event, loaded, running: int, seconds: int, still: bool
) -> None:
    registry.on_event("a", make_event("d", "decode"), 100.0)
    start_ns = 5 * 10**9
    for now, sampled_ns in ((100.0, start_ns), (110.0, start_ns + seconds * 10**9)):
        registry.on_event("a", loaded("d", num_running=running, sampled_ns=sampled_ns), now)
    assert registry.instances["d"].stalled_at == (110.0 if still else -math.inf)


def test_a_lost_connection_closes_at_once_and_stays_no_mere_silence(registry, make_event) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    registry.on_disconnect("a")
    registry.update_connectivity(3.0)
    assert open_names(registry) == set()
    assert registry.instances["d"].connectivity is Connectivity.DISCONNECTED
    registry.on_event("a", make_event("d", "decode"), 0.1)
    assert open_names(registry) == {"d"}


def test_a_new_boot_drops_the_load_of_the_old_one(registry, make_event) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    router = Router(registry)
    pick = router.pick("m", 100, 10)
    registry.on_event("a", make_event("d", "decode", boot_id="second"), 1.0)
    fresh = router.pick("m", 7, 1)
    router.release(pick)
    assert registry.instances["d"].in_flight.resident.own == 8
    router.release(fresh)


def test_a_flip_keeps_the_load(registry, make_event) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    Router(registry).pick("m", 100, 10)
    registry.on_event("a", make_event("d", "prefill", epoch=2), 1.0)
    assert registry.instances["d"].in_flight.resident.own == 110


def test_a_report_of_an_earlier_boot_is_ignored(registry, make_event, loaded) -> None:
    registry.on_event("a", make_event("d", "decode", boot_id="second"), 0.0)
    registry.on_event("a", loaded("d", prompt=5_000, boot_id="first"), 0.1)
    assert registry.instances["d"].in_flight.prompt.pending == 0


def test_a_name_that_moved_is_not_lost_with_its_old_address(registry, make_event) -> None:
    registry.on_event("old", make_event("d", "decode", boot_id="1"), 0.0)
    registry.on_event("new", make_event("d", "decode", boot_id="2"), 1.0)
    registry.on_disconnect("old")
    registry.remove_agent("old")
    assert open_names(registry) == {"d"}
    registry.remove_agent("new")
    assert not registry.instances
    assert not registry.models


def test_names_of_models_and_adapters_outlive_their_fleet(registry, make_event) -> None:
    registry.on_event("a", make_event("d", "decode", adapters=["sql"]), 0.0)
    registry.remove_agent("a")
    assert registry.known_models.keys() == {"m", "sql"}


@pytest.mark.interpreted
def test_the_number_of_remembered_models_is_bounded(registry, make_event, monkeypatch) -> None:
    monkeypatch.setattr("cleave.router.registry.MAX_KNOWN_MODELS", 3)
    registry.on_event("a", make_event("d", "decode", adapters=["a", "b", "c", "d"]), 0.0)
    registry.on_event("a", make_event("d", "decode", adapters=["e"]), 0.0)
    assert registry.known_models.keys() == {"a", "b", "c"}


def test_an_address_that_serves_another_name_lets_go_of_the_first(registry, make_event) -> None:
    registry.on_event("a", make_event("d1", "decode"), 0.0)
    registry.on_event("a", make_event("d2", "decode"), 1.0)
    assert set(registry.instances) == {"d2"}


def test_models_are_separate(registry, make_event) -> None:
    registry.on_event("a", make_event("p", "prefill", model="m1"), 0.0)
    registry.on_event("b", make_event("d", "decode", model="m2"), 0.0)
    assert set(registry.models) == {"m1", "m2"}
    assert Router(registry).pick("m2", 1).decode.instance == "d"


def test_resident_tokens_are_blocks_in_use(registry, make_event, loaded) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    registry.on_event("a", loaded("d", blocks_used=10), 0.1)
    assert registry.instances["d"].in_flight.resident.pending == 160


def test_more_free_blocks_than_there_are_is_no_negative_load(registry, make_event) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    load = agent_pb2.LoadReport(boot_id="d-boot", kv_blocks_free=5_000)
    registry.on_event("a", agent_pb2.WatchEvent(load=load), 0.1)
    assert registry.instances["d"].in_flight.resident.pending == 0


@pytest.mark.parametrize("field", ["role", "state"])
def test_an_instance_of_a_newer_version_is_known_and_given_nothing(
    registry, make_event, field: str
) -> None:
    registry.on_event("a", make_event("d1", "decode"), 0.0)
    registry.on_event("b", make_event("d2", "decode"), 0.0)
    event = make_event("d2", "decode")
    setattr(event.registration, field, 9)
    registry.on_event("b", event, 1.0)
    assert (set(registry.instances), open_names(registry)) == ({"d1", "d2"}, {"d1"})
    router = Router(registry)
    assert [router.pick("m", 10).decode.instance for _ in range(3)] == ["d1"] * 3
    registry.on_event("b", make_event("d2", "decode"), 2.0)
    assert open_names(registry) == {"d1", "d2"}


def test_the_reason_a_newer_version_gets_no_requests_is_logged(registry, make_event) -> None:
    for number, field in enumerate(("role", "state")):
        event = make_event(f"d{number}", "decode")
        setattr(event.registration, field, 9)
        registry.on_event(field, event, 0.0)
    with pytest.raises(NoInstance, match=r"d0 \(unknown_9\): .*; d1 \(decode\): unknown_9"):
        Router(registry).pick("m", 10)


@pytest.mark.parametrize("name", ["d", "other"])
def test_an_invalid_registration_is_ignored(registry, make_event, name: str) -> None:
    registry.on_event("a", make_event("d", "decode"), 0.0)
    before = registry.instances["d"]
    with pytest.raises(ValueError, match="Port"):
        registry.on_event("a", make_event(name, "prefill", engine_url="http://127.0.0.1:x"), 1.0)
    assert registry.instances == {"d": before}
    assert before.registration.role == agent_pb2.ROLE_DECODE
    assert open_names(registry) == {"d"}
    registry.on_disconnect("a")
    assert open_names(registry) == set()
