"""Adapters: who serves them, and where their requests stay."""

import random
from collections import Counter

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.prefix_cache import FIRST_BLOCK_BYTES
from cleave.policy.session_affinity import ADAPTER_TOKENS, to_key
from cleave.router.errors import NoInstance, UnknownModel
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2

FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
KEEPING = [
    DispatchPolicy.SHORTEST_WAIT,
    DispatchPolicy.PENDING_TOKENS,
    DispatchPolicy.POWER_OF_TWO,
    DispatchPolicy.PREFIX_AWARE,
]


@pytest.fixture
def routed(make_event, clock):
    """A router over `name=role` instances that serve adapters."""

    def make(policy: DispatchPolicy, roles: dict[str, str], *adapters: str) -> Router:
        registry = InstanceRegistry(policy)
        for name, role in roles.items():
            registry.on_event(name, make_event(name, role, adapters=adapters), 0.0)
        return Router(registry, clock=clock, seed=5)

    return make


def serve(router: Router, model: str, **request: object) -> tuple[str | None, str]:
    """The instances of a request that ends at once."""
    pick = router.pick(model, 100, **request)
    router.release(pick)
    return pick.prefill.instance if pick.prefill else None, pick.decode.instance


def test_an_adapter_is_served_by_the_instances_of_its_base(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, FOUR, "sql", "law")
    models = router.registry.models
    assert {name: known.base for name, known in models.items()} == {"m": "", "sql": "m", "law": "m"}
    assert models["sql"].score_tables == models["m"].score_tables
    assert serve(router, "sql")[0] in ("p1", "p2")


def test_an_adapter_without_instances_is_an_unknown_model(routed) -> None:
    with pytest.raises(UnknownModel):
        serve(routed(DispatchPolicy.SHORTEST_WAIT, FOUR, "sql"), "law")


def test_a_revision_serves_what_all_of_it_that_has_answered_serve(registry, make_event) -> None:
    registry.on_event("p", make_event("p", "prefill", adapters=["sql", "law"]), 0.0)
    registry.on_event("d", make_event("d", "decode", adapters=["sql"]), 0.0)
    starting = make_event("e", "decode", state=agent_pb2.STATE_STARTING)
    registry.on_event("e", starting, 0.0)
    assert set(registry.models) == {"m", "sql"}


def test_a_new_revision_alone_gets_what_the_old_one_lacks(registry, make_event) -> None:
    registry.on_event("a", make_event("a", "mixed"), 0.0)
    registry.on_event("b", make_event("b", "mixed", revision="r2", adapters=["sql"]), 0.0)
    router = Router(registry)
    assert {serve(router, "sql") for _ in range(8)} == {(None, "b")}
    assert {serve(router, "m")[1] for _ in range(8)} == {"a", "b"}


def test_an_adapter_outlives_the_restart_of_all_engines(registry, make_event) -> None:
    for name in ("a", "b"):
        fields = {"adapters": ["sql"], "state": agent_pb2.STATE_STARTING, "boot_id": f"new-{name}"}
        registry.on_event(name, make_event(name, "mixed", **fields), 0.0)
    with pytest.raises(NoInstance):
        Router(registry).pick("sql", 100)


def test_a_model_goes_before_an_adapter_of_its_name(registry, make_event) -> None:
    registry.on_event("a", make_event("a", "mixed", adapters=["sql"]), 0.0)
    registry.on_event("b", make_event("b", "mixed", model="sql", deployment="other"), 0.0)
    assert serve(Router(registry), "sql") == (None, "b")


@pytest.mark.parametrize("policy", KEEPING)
def test_requests_of_an_adapter_stay_together_in_both_phases(
    routed, policy: DispatchPolicy
) -> None:
    adapters = [f"a{n}" for n in range(16)]
    router = routed(policy, FOUR, *adapters)
    homes = {name: {serve(router, name) for _ in range(6)} for name in adapters}
    assert all(len(found) == 1 for found in homes.values())
    assert len({home for found in homes.values() for home in found}) == 4, "but adapters spread"
    assert len({serve(router, "m") for _ in range(20)}) > 1, "and the model itself does not stay"


@pytest.mark.parametrize("policy", KEEPING)
def test_an_adapter_goes_elsewhere_when_staying_costs_more(routed, policy: DispatchPolicy) -> None:
    router = routed(policy, {"a": "mixed", "b": "mixed"}, "sql")
    counts = Counter(router.pick("sql", 200, 100).decode.instance for _ in range(200))
    assert min(counts.values()) * 300 >= max(counts.values()) * 300 - ADAPTER_TOKENS - 300


@pytest.mark.parametrize(("slots", "homes"), [(1, 1), (2, 2), (3, 2)])
def test_adapters_that_all_fit_are_treated_like_their_model(
    registry, make_event, slots: int, homes: int
) -> None:
    for name in ("a", "b"):
        event = make_event(name, "mixed", adapters=["sql", "law"], max_adapters=slots)
        registry.on_event(name, event, 0.0)
    router = Router(registry)
    assert len({serve(router, "sql") for _ in range(8)}) == homes


@pytest.mark.parametrize(
    "policy", sorted(set(DispatchPolicy) - set(KEEPING), key=lambda each: each.value)
)
def test_other_policies_treat_adapters_like_their_model(routed, policy: DispatchPolicy) -> None:
    served = []
    for model in ("m", "sql"):
        router = routed(policy, FOUR, "sql")
        served.append([serve(router, model) for _ in range(20)])
    assert served[0] == served[1]


def test_every_gateway_keeps_an_adapter_at_the_same_place(routed) -> None:
    adapters = [f"a{n}" for n in range(16)]
    homes = []
    for seed in (1, 2):
        router = routed(DispatchPolicy.SHORTEST_WAIT, FOUR, *adapters)
        for _ in range(seed):
            router.pick("m", 10)
        homes.append([serve(router, name) for name in adapters])
    assert homes[0] == homes[1]


def test_a_session_goes_before_its_adapter(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, FOUR, "sql")
    sessions = [serve(router, "sql", session=b"user-%d" % n)[0] for n in range(20)]
    assert set(sessions) == {"p1", "p2"}


def test_kv_of_one_adapter_does_not_match_another(routed) -> None:
    router = routed(DispatchPolicy.PREFIX_AWARE, FOUR, "sql", "law")
    text = b"x" * FIRST_BLOCK_BYTES * 4 + b"]"
    for model, todo in (("m", 500), ("sql", 500), ("sql", 0), ("law", 500), ("m", 0)):
        pick = router.pick(model, 500, text=text)
        assert round(pick._prefill_entry[2]) == todo, model
        router.observe_completion(pick, 1)
        router.release(pick)


def test_nothing_is_in_flight_after_requests_of_many_adapters(routed) -> None:
    adapters = [f"a{n}" for n in range(4)]
    router = routed(DispatchPolicy.SHORTEST_WAIT, FOUR, *adapters)
    rng = random.Random(2)
    picks = [router.pick(rng.choice(["m", *adapters]), rng.randint(1, 999)) for _ in range(100)]
    for pick in picks:
        router.release(pick)
    for instance in router.registry.instances.values():
        assert (instance.in_flight.num_requests, instance.in_flight.prompt.own) == (0, 0)


def test_keys_of_adapters_differ(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, FOUR, "sql", "law")
    keys = [router.registry.models[name].adapter for name in ("m", "sql", "law")]
    assert keys == [None, to_key("sql"), to_key("law")]


RUNTIME = {"name": "sql", "engine_name": "sql@1", "loaded": True, "generation": 1}


def make_runtime(*changes: dict) -> list[agent_pb2.RuntimeAdapter]:
    """Adapters that were loaded at run time: `RUNTIME` with changes."""
    return [agent_pb2.RuntimeAdapter(**RUNTIME | each) for each in changes]


def test_a_runtime_adapter_is_served_where_it_is_loaded_in_both_phases(
    registry, make_event
) -> None:
    for name, role in FOUR.items():
        has_it = make_runtime({}) if name in ("p2", "d1") else []
        registry.on_event(name, make_event(name, role, runtime_adapters=has_it), 0.0)
    router = Router(registry)
    assert {serve(router, "sql") for _ in range(12)} == {("p2", "d1")}
    assert {serve(router, "m")[0] for _ in range(12)} == {"p1", "p2"}
    assert router.pick("sql", 10).engine_model == "sql@1"
    assert router.pick("m", 10).engine_model == ""
    assert router.explain_unavailable("sql") == ""


def test_a_pair_never_has_two_sources_of_an_adapter(registry, make_event) -> None:
    newer = {"engine_name": "sql@2", "generation": 2}
    for name, role in FOUR.items():
        event = make_event(name, role, runtime_adapters=make_runtime({}))
        registry.on_event(name, event, 0.0)
    router = Router(registry)
    for name, role in FOUR.items():
        assert router.pick("sql", 10).engine_model == "sql@1", f"before {name} has the new one"
        event = make_event(name, role, runtime_adapters=make_runtime(newer, {}))
        registry.on_event(name, event, 0.0)
    assert router.pick("sql", 10).engine_model == "sql@2", "the newest that all have"
    alone = make_event("p1", "prefill", runtime_adapters=make_runtime(newer))
    registry.on_event("p1", alone, 0.0)
    assert router.pick("sql", 10).engine_model == "sql@2"


def test_the_source_that_more_open_instances_have_is_served(registry, make_event) -> None:
    old, new = make_runtime({}), make_runtime({"engine_name": "sql@2", "generation": 2})
    states = {"a": (old, agent_pb2.STATE_READY), "b": (new, agent_pb2.STATE_STARTING)}
    for name, (adapters, state) in states.items():
        event = make_event(name, "mixed", runtime_adapters=adapters, state=state)
        registry.on_event(name, event, 0.0)
    assert serve(Router(registry), "sql") == (None, "a")


def test_an_adapter_that_no_instance_has_loaded_is_waited_for(registry, make_event) -> None:
    event = make_event("a", "mixed", runtime_adapters=make_runtime({"loaded": False}))
    registry.on_event("a", event, 0.0)
    with pytest.raises(NoInstance, match="no instance has loaded the adapter 'sql' yet"):
        Router(registry).pick("sql", 10)
    with pytest.raises(UnknownModel):
        Router(registry).pick("law", 10)
    registry.on_event("a", make_event("a", "mixed", runtime_adapters=make_runtime({})), 0.0)
    assert serve(Router(registry), "sql") == (None, "a")
    registry.on_event("a", make_event("a", "mixed"), 0.0)
    with pytest.raises(UnknownModel):
        Router(registry).pick("sql", 10)


def test_an_instance_without_the_adapter_is_no_substitute(registry, make_event) -> None:
    draining = agent_pb2.STATE_DRAINING
    gone = make_event("a", "mixed", runtime_adapters=make_runtime({}), state=draining)
    registry.on_event("a", gone, 0.0)
    registry.on_event("b", make_event("b", "mixed"), 0.0)
    router = Router(registry)
    with pytest.raises(NoInstance, match=r"b .mixed.: has not loaded the adapter"):
        router.pick("sql", 10, excluded=("x",), suspect=("y",))
    assert "has not loaded the adapter" in router.explain_unavailable("sql")


def test_an_adapter_from_the_start_goes_before_one_loaded_later(registry, make_event) -> None:
    event = make_event("a", "mixed", adapters=["sql"], runtime_adapters=make_runtime({}))
    registry.on_event("a", event, 0.0)
    assert Router(registry).pick("sql", 10).engine_model == ""


def test_caches_of_two_sources_are_not_confused(registry, make_event) -> None:
    registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
    text = b"x" * FIRST_BLOCK_BYTES * 4 + b"]"
    router = Router(registry)
    for engine_name, todo in (("sql@1", 500), ("sql@1", 0), ("sql@2", 500)):
        adapters = make_runtime({"engine_name": engine_name})
        registry.on_event("a", make_event("a", "mixed", runtime_adapters=adapters), 0.0)
        pick = router.pick("sql", 500, text=text)
        assert round(pick._prefill_entry[2]) == todo, engine_name
        router.observe_completion(pick, 1)
        router.release(pick)


def test_more_runtime_adapters_than_fit_stay_together(registry, make_event) -> None:
    both = make_runtime({}, {"name": "law", "engine_name": "law@1"})
    for name in ("a", "b"):
        event = make_event(name, "mixed", runtime_adapters=both, max_adapters=1)
        registry.on_event(name, event, 0.0)
    assert len({serve(Router(registry), "sql") for _ in range(8)}) == 1
