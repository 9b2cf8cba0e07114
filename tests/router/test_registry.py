"""What agents say, and stop saying, and what that opens and closes."""

import math
import random
import time

import pytest

from cleave.router.errors import NoInstance
from cleave.router.instance import Connectivity
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.boot_ids import create_boot_id
from cleave.rpc.registration_checks import RegistrationError
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
    registry.listed = {"new"}
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


def register(registry, event, agent: str, now: float) -> str:
    """Register an instance; returns what is wrong with it."""
    try:
        registry.on_event(agent, event, now)
    except RegistrationError as error:
        return str(error)
    return ""


def test_the_name_of_another_agents_instance_is_refused_while_that_one_is_there(
    registry, make_event, loaded
) -> None:
    registry.on_event("a:1", make_event("d", "decode"), 0.0)
    registry.on_event("b:1", make_event("e", "decode"), 0.0)
    usurped = make_event("d", "prefill", boot_id="other")
    assert "is that of the agent a:1" in register(registry, usurped, "b:1", 1.0)
    assert {i.name: i.agent for i in registry.instances.values()} == {"d": "a:1", "e": "b:1"}
    registry.on_event("a:1", loaded("d"), 30.0)
    assert register(registry, usurped, "b:1", 89.0)
    assert open_names(registry) == {"d", "e"}
    # It has been silent for a minute: its successor has another address.
    assert not register(registry, usurped, "b:1", 91.0)
    assert {i.name: i.agent for i in registry.instances.values()} == {"d": "b:1"}


def test_an_agent_that_is_listed_no_longer_keeps_neither_name_nor_boot(
    registry, make_event
) -> None:
    registry.on_event("a:1", make_event("d", "decode"), 0.0)
    registry.listed = {"a:1", "b:1"}
    assert register(registry, make_event("d", "decode"), "b:1", 1.0)
    assert register(registry, make_event("e", "decode", boot_id="d-boot"), "b:1", 1.0)
    registry.listed = {"b:1"}
    assert not register(registry, make_event("d", "decode"), "b:1", 2.0)
    assert registry.instances["d"].agent == "b:1"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_boot_of_another_instance_is_refused_in_either_order(
    registry, make_event, is_first: bool
) -> None:
    boot_id = create_boot_id("victim")
    victim = make_event("victim", "decode", boot_id=boot_id)
    rogue = make_event("rogue", "decode", boot_id=boot_id)
    reports = [(rogue, "r:1"), (victim, "v:1")] if is_first else [(victim, "v:1"), (rogue, "r:1")]
    for event, agent in reports:
        register(registry, event, agent, 0.0)
    assert set(registry.instances) == {"victim"}
    assert "is that of instance 'victim'" in register(registry, rogue, "r:1", 1.0)
    assert [i.name for i in registry.models["m"].instances] == ["victim"]


def test_boots_of_other_kinds_are_those_of_the_first_that_reports_them(
    registry, make_event
) -> None:
    registry.on_event("v:1", make_event("victim", "decode", boot_id="same"), 0.0)
    registry.on_event("r:1", make_event("rogue", "decode"), 0.0)
    assert register(registry, make_event("rogue", "decode", boot_id="same"), "r:1", 1.0)
    assert registry.instances["rogue"].target.boot_id == "rogue-boot"
    # Once its instance has another boot, it is free; nothing refers to it any more.
    registry.on_event("v:1", make_event("victim", "decode", boot_id="next"), 2.0)
    assert not register(registry, make_event("rogue", "decode", boot_id="same"), "r:1", 3.0)


def test_engines_that_have_not_started_share_no_boot(registry, make_event) -> None:
    for name in ("d1", "d2"):
        event = make_event(name, "decode", state=agent_pb2.STATE_STARTING)
        event.registration.boot_id = ""
        registry.on_event(name, event, 0.0)
    assert set(registry.instances) == {"d1", "d2"}


def test_an_instance_of_an_agent_that_now_has_another_one_frees_its_boot(
    registry, make_event
) -> None:
    registry.on_event("a:1", make_event("d", "decode", boot_id="b"), 0.0)
    registry.on_event("a:1", make_event("e", "decode", boot_id="c"), 1.0)
    assert not register(registry, make_event("f", "decode", boot_id="b"), "b:1", 2.0)
    assert set(registry.instances) == {"e", "f"}


@pytest.fixture
def large(registry, make_event) -> InstanceRegistry:
    """1,024 instances."""
    for number in range(1_024):
        role = ["prefill", "decode"][number % 2]
        registry.on_event(f"a{number}:1", make_event(f"i{number:04}", role), 0.0)
    assert len(registry.models["m"].instances) == 1_024
    return registry


CHANGES = [
    {},
    {"epoch": (7, 8)},
    {"reason": ("x", "y")},
    {"boot_id": ("one", "two")},
    {"state": (agent_pb2.STATE_DRAINING, agent_pb2.STATE_READY)},
    {"role": (agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE)},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda fields: "".join(fields) or "unchanged")
def test_a_registration_among_1024_takes_less_than_a_millisecond(
    large, make_event, changes: dict
) -> None:
    events = [make_event("i0000", "prefill"), make_event("i0000", "prefill")]
    for field, values in changes.items():
        for event, value in zip(events, values, strict=True):
            setattr(event.registration, field, value)
    took = []
    for round_ in range(5):
        began = time.thread_time()
        for n in range(10):
            large.on_event("a0:1", events[n % 2], 1.0 + round_ + n)
            assert large.models
        took.append((time.thread_time() - began) / 10)
    assert min(took) < 0.001
    if not changes:
        assert min(took) < 0.000_1


def test_instances_that_leave_together_cost_one_table(large) -> None:
    began = time.thread_time()
    for number in range(512):
        large.remove_agent(f"a{number}:1")
    assert len(large.models["m"].instances) == 512
    assert time.thread_time() - began < 0.2, "a table takes 5 ms"


@pytest.mark.parametrize("seed", range(20))
def test_each_boot_is_of_one_instance_and_rogues_displace_no_other(
    registry, make_event, seed: int
) -> None:
    rng, now, agents = random.Random(seed), 0.0, {"v0": "v:0", "v1": "v:1"}
    boots, reported = {name: create_boot_id(name) for name in agents}, set()
    for _ in range(200):
        now += rng.random()
        if rng.random() < 0.4:
            name = rng.choice(list(agents))
            if rng.random() < 0.1:
                boots[name] = create_boot_id(name)
            event = make_event(name, "decode", boot_id=boots[name])
            assert not register(registry, event, agents[name], now)
            reported.add(name)
        else:
            name = rng.choice(["r0", "r1", *agents])
            taken = rng.choice([*boots.values(), create_boot_id(name), "other"])
            rogue, boot_id = rng.choice(["r:0", "r:1"]), taken + rng.choice(["", "", "_dp1"])
            if name not in agents or name in reported:
                register(registry, make_event(name, "mixed", boot_id=boot_id), rogue, now)
        held = [each.target.boot_id for each in registry.instances.values()]
        assert len(set(held)) == len(held)
        victims = {name: registry.instances[name] for name in reported}
        assert all(each.agent == agents[name] for name, each in victims.items())
        for table in registry.list_tables():
            assert all(each.score_table is table for each in table.instances)
