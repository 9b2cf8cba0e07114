"""Which instances a request gets, and what that does to the load accounting."""

import contextlib
import random

import pytest

from cleave.api.enums import FallbackPolicy
from cleave.policy.queue_model import DEFAULT_TOKEN_MS
from cleave.router.errors import NoInstance, UnknownModel
from cleave.router.router import RequestPhase, Router
from cleave.rpc.v1 import agent_pb2


def names(pick) -> tuple[str | None, str]:
    return pick.prefill.instance if pick.prefill else None, pick.decode.instance


def pending(router: Router) -> dict[str, tuple[float, float]]:
    instances = router.registry.instances
    return {n: (i.in_flight.prompt.own, i.in_flight.resident.own) for n, i in instances.items()}


def test_a_request_is_split_between_prefill_and_decode(fleet_of) -> None:
    pick = Router(fleet_of(p="prefill", d="decode")).pick("m", 100, 50)
    assert (names(pick), pick.reason) == (("p", "d"), "disaggregated")


def test_a_pick_names_the_boot_it_was_made_for(fleet_of) -> None:
    pick = Router(fleet_of(p="prefill", d="decode")).pick("m", 1)
    assert pick.prefill.boot_id == "p-boot"


def test_while_no_instance_answers_no_model_is_unknown(fleet_of) -> None:
    with pytest.raises(NoInstance, match="no instance has answered"):
        Router(fleet_of()).pick("m", 1)


def test_an_unknown_model_differs_from_a_busy_one(fleet_of) -> None:
    router = Router(fleet_of(p="prefill"), FallbackPolicy.NEVER)
    with pytest.raises(UnknownModel, match="gpt-9"):
        router.pick("gpt-9", 1)
    with pytest.raises(NoInstance):
        router.pick("m", 1)


def test_equal_instances_take_turns(fleet_of) -> None:
    router = Router(fleet_of(p1="prefill", p2="prefill", d1="decode", d2="decode"))
    picks = []
    for _ in range(4):
        pick = router.pick("m", 10)
        router.release(pick)
        picks.append(names(pick))
    assert picks == [("p1", "d1"), ("p2", "d2"), ("p1", "d1"), ("p2", "d2")]


def test_own_dispatches_count_before_any_report(fleet_of) -> None:
    router = Router(fleet_of(p1="prefill", p2="prefill", d="decode"))
    assert names(router.pick("m", 1_000))[0] == "p1"
    assert [names(router.pick("m", 100))[0] for _ in range(3)] == ["p2", "p2", "p2"]


def test_of_queues_of_equal_tokens_the_one_with_fewer_prompts_is_through_first(fleet_of) -> None:
    """Each prompt takes 50 ms, and 0.1 ms for each of its tokens."""
    now_ms = 0.0
    router = Router(fleet_of(p1="prefill", p2="prefill", d="decode"), clock=lambda: now_ms / 1000)
    for number in range(200):
        pick = router.pick("m", 100 + number * 37 % 900)
        now_ms += 50.0 + 0.1 * pick.prompt_tokens
        router.release(pick, RequestPhase.PREFILL)
        router.release(pick)
    first = names(router.pick("m", 1_000))[0]
    many = [names(router.pick("m", 190))[0] for _ in range(4)]
    assert first not in many[:3]
    assert many[3] == first, "150 ms are less than three times 69"


def test_prompt_times_are_not_learnt_on_busy_instances(fleet_of, loaded) -> None:
    now = 0.0
    registry = fleet_of(p="prefill", d="decode")
    router = Router(registry, clock=lambda: now)
    queue = registry.instances["p"].in_flight.queue
    for _ in range(20):
        now += 3_600.0
        pick = router.pick("m", 1_000)
        registry.on_event("p", loaded("p", 1_500), now)
        now += 1.0
        router.release(pick, RequestPhase.PREFILL)
        router.release(pick)
    assert queue.token_ms == DEFAULT_TOKEN_MS
    registry.on_event("p", loaded("p"), now)
    pick = router.pick("m", 1_000)
    now += 1.0
    router.release(pick, RequestPhase.PREFILL)
    assert queue.token_ms > 5 * DEFAULT_TOKEN_MS


def test_work_of_other_routers_counts_from_its_report(fleet_of, loaded) -> None:
    now = 50.0
    registry = fleet_of(p1="prefill", p2="prefill", d="decode")
    router = Router(registry, clock=lambda: now)
    for pick in [router.pick("m", 1_000) for _ in range(2)]:
        router.release(pick)
    now = 5_000.0
    assert names(router.pick("m", 1_000))[0] == "p1"
    registry.on_event("p2", loaded("p2", 1_500), now)
    assert names(router.pick("m", 1_000))[0] == "p1", "p2 has not begun long ago"


def test_work_of_others_counts_as_reported(fleet_of, loaded) -> None:
    registry = fleet_of(p1="prefill", p2="prefill", d1="decode", d2="decode")
    registry.on_event("p1", loaded("p1", prompt=5_000), 0.1)
    registry.on_event("d1", loaded("d1", blocks_used=900), 0.1)
    assert names(Router(registry).pick("m", 10)) == ("p2", "d2")


def test_release_of_the_prefill_phase_frees_the_prompt_only(fleet_of) -> None:
    router = Router(fleet_of(p="prefill", d="decode"))
    pick = router.pick("m", 100, 50)
    assert pending(router) == {"p": (100, 0), "d": (0, 150)}
    router.release(pick, RequestPhase.PREFILL)
    assert pending(router) == {"p": (0, 0), "d": (0, 150)}
    router.release(pick, RequestPhase.DECODE)
    assert pending(router) == {"p": (0, 0), "d": (0, 0)}
    assert not pick.is_open


def test_releasing_twice_changes_nothing(fleet_of) -> None:
    router = Router(fleet_of(p="prefill", d="decode"))
    first, second = router.pick("m", 100, 50), router.pick("m", 7, 5)
    for _ in range(3):
        router.release(first)
    assert pending(router) == {"p": (7, 0), "d": (0, 12)}
    router.release(second)


def test_a_request_that_cannot_be_split_gets_one_instance(fleet_of) -> None:
    pick = Router(fleet_of(p="prefill", d="decode"), FallbackPolicy.NEVER).pick(
        "m", 1, colocated=True
    )
    assert (names(pick), pick.reason) == ((None, "d"), "single-instance")


def test_a_mixed_instance_serves_whole_requests_under_any_fallback(fleet_of) -> None:
    pick = Router(fleet_of(x="mixed"), FallbackPolicy.NEVER).pick("m", 1)
    assert (names(pick), pick.reason) == ((None, "x"), "mixed")


def test_a_prefill_instance_may_hand_over_to_a_mixed_one(fleet_of) -> None:
    assert names(Router(fleet_of(p="prefill", x="mixed")).pick("m", 1)) == ("p", "x")


def test_mixed_instances_take_prompts_off_a_long_prefill_queue(fleet_of) -> None:
    router = Router(fleet_of(p="prefill", d="decode", x="mixed"))
    assert names(router.pick("m", 1_000)) == ("p", "d")
    assert names(router.pick("m", 10)) == (None, "x")


@pytest.mark.parametrize(
    ("fallback", "lost", "served"),
    [
        (FallbackPolicy.ALWAYS, False, True),
        (FallbackPolicy.ALWAYS, True, True),
        (FallbackPolicy.ON_PREFILL_LOSS, False, False),
        (FallbackPolicy.ON_PREFILL_LOSS, True, True),
        (FallbackPolicy.NEVER, False, False),
        (FallbackPolicy.NEVER, True, False),
    ],
)
def test_without_prefill_the_fallback_decides(fleet_of, fallback, lost, served) -> None:
    router = Router(fleet_of(d="decode"), fallback)
    if served:
        pick = router.pick("m", 1, prefill_lost=lost)
        assert (names(pick), pick.reason) == ((None, "d"), "no-prefill")
    else:
        with pytest.raises(NoInstance):
            router.pick("m", 1, prefill_lost=lost)


@pytest.mark.parametrize("fallback", [FallbackPolicy.NEVER, FallbackPolicy.ON_PREFILL_LOSS])
def test_a_prefill_instance_serves_whole_only_as_the_last_resort_of_always(
    fleet_of, fallback
) -> None:
    registry = fleet_of(p="prefill")
    pick = Router(registry, FallbackPolicy.ALWAYS).pick("m", 1)
    assert (names(pick), pick.reason) == ((None, "p"), "no-decode")
    with pytest.raises(NoInstance):
        Router(registry, fallback).pick("m", 1, prefill_lost=True)


def test_what_failed_the_request_is_excluded(fleet_of) -> None:
    router = Router(
        fleet_of(p1="prefill", p2="prefill", d1="decode", d2="decode"), FallbackPolicy.NEVER
    )
    assert names(router.pick("m", 1, excluded={"p1", "d1"})) == ("p2", "d2")
    with pytest.raises(NoInstance, match="failed this request"):
        router.pick("m", 1, excluded={"p1", "p2"})


def test_different_revisions_and_deployments_never_pair(registry, make_event) -> None:
    registry.on_event("p", make_event("p", "prefill", revision="r1"), 0)
    registry.on_event("d", make_event("d", "decode", revision="r2"), 0)
    registry.on_event("d2", make_event("d2", "decode", deployment="other"), 0)
    with pytest.raises(NoInstance):
        Router(registry, FallbackPolicy.NEVER).pick("m", 1)
    registry.on_event("d3", make_event("d3", "decode", revision="r1"), 0)
    assert names(Router(registry).pick("m", 1)) == ("p", "d3")


@pytest.mark.parametrize("unverified", ["p", "d"])
def test_an_untested_kv_path_carries_no_hand_off(registry, make_event, unverified) -> None:
    registry.on_event("p", make_event("p", "prefill", verified=unverified != "p"), 0)
    registry.on_event("d", make_event("d", "decode", verified=unverified != "d"), 0)
    assert names(Router(registry).pick("m", 1)) == (None, "d")
    with pytest.raises(NoInstance, match="KV path not verified"):
        Router(registry, FallbackPolicy.NEVER).pick("m", 1)


@pytest.mark.parametrize(
    "state", [agent_pb2.STATE_STARTING, agent_pb2.STATE_VERIFYING, agent_pb2.STATE_DRAINING]
)
def test_only_ready_instances_are_picked(registry, make_event, state) -> None:
    registry.on_event("d1", make_event("d1", "decode", state=state), 0)
    registry.on_event("d2", make_event("d2", "decode"), 0)
    router = Router(registry)
    assert {names(router.pick("m", 1)) for _ in range(4)} == {(None, "d2")}


@pytest.mark.parametrize("url", ["", "http://127.0.0.1", "nonsense"])
def test_an_instance_without_an_address_is_not_picked(registry, make_event, url: str) -> None:
    event = make_event("d", "decode")
    event.registration.engine_url = url
    registry.on_event("d", event, 0)
    with pytest.raises(NoInstance):
        Router(registry).pick("m", 1)


def test_a_doubted_instance_comes_before_the_last_resort_and_after_all_others(fleet_of) -> None:
    router = Router(fleet_of(p="prefill", d1="decode", d2="decode"))
    assert names(router.pick("m", 1, colocated=True, suspect={"d1"})) == (None, "d2")
    assert names(router.pick("m", 1, colocated=True, excluded={"d2"}, suspect={"d1"})) == (
        None,
        "d1",
    )
    assert names(router.pick("m", 1, colocated=True, excluded={"d1", "d2"})) == (None, "p")


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        ({"p1"}, ("p2", "d1")),
        ({"d1"}, ("p1", "d2")),
        ({"p1", "p2"}, ("p1", "d1")),
        ({"p1", "p2", "d1", "d2"}, ("p1", "d1")),
    ],
    ids=["a prefill", "a decode", "every prefill", "all"],
)
def test_an_instance_in_doubt_is_picked_last(registry, make_event, silent, expected) -> None:
    for name in ("p1", "p2", "d1", "d2"):
        role = "prefill" if name.startswith("p") else "decode"
        registry.on_event(name, make_event(name, role), 0.0 if name in silent else 5.0)
    registry.update_connectivity(5.0)
    router = Router(registry)
    assert names(router.pick("m", 10)) == expected
    if len(silent) == 1:
        picks = [names(router.pick("m", 100_000)) for _ in range(20)]
        assert not {name for pick in picks for name in pick} & silent, "however long the queues"


def test_instances_in_doubt_share_the_load(registry, make_event) -> None:
    for name in ("d1", "d2"):
        registry.on_event(name, make_event(name, "decode"), 0.0)
    registry.update_connectivity(5.0)
    router = Router(registry)
    assert [names(router.pick("m", 10))[1] for _ in range(4)] == ["d1", "d2", "d1", "d2"]


@pytest.mark.parametrize("silent", ["p", "d"])
@pytest.mark.parametrize("verified", [True, False])
def test_a_mixed_instance_comes_before_a_split_in_doubt(
    registry, make_event, silent, verified
) -> None:
    for name, role in {"p": "prefill", "d": "decode"}.items():
        registry.on_event(name, make_event(name, role), 0.0 if name == silent else 5.0)
    registry.on_event("x", make_event("x", "mixed", verified=verified), 5.0)
    registry.update_connectivity(5.0)
    picked = names(Router(registry).pick("m", 10))
    assert silent not in picked
    assert "x" in picked


def test_a_mixed_instance_in_doubt_comes_after_a_split(registry, make_event) -> None:
    for name, role in {"p": "prefill", "d": "decode"}.items():
        registry.on_event(name, make_event(name, role), 5.0)
    registry.on_event("x", make_event("x", "mixed"), 0.0)
    registry.update_connectivity(5.0)
    router = Router(registry)
    assert {names(router.pick("m", 1_000)) for _ in range(3)} == {("p", "d")}


@pytest.mark.parametrize("silent", ["p1", "d1"])
def test_a_revision_in_doubt_comes_after_one_that_is_not(registry, make_event, silent) -> None:
    for name, role in {"p1": "prefill", "d1": "decode", "p2": "prefill", "d2": "decode"}.items():
        heard_at = 0.0 if name == silent else 5.0
        registry.on_event(name, make_event(name, role, revision=name[1:]), heard_at)
    registry.update_connectivity(5.0)
    router = Router(registry)
    assert {names(router.pick("m", 1_000)) for _ in range(3)} == {("p2", "d2")}


def make_revisions(registry, make_event, **counts: tuple[int, int]) -> None:
    """`revision=(prefill, decode)` instances, named p-REVISION-0 and so on."""
    for revision, (prefill, decode) in counts.items():
        for role, count in (("prefill", prefill), ("decode", decode)):
            for n in range(count):
                name = f"{role[0]}-{revision}-{n}"
                registry.on_event(name, make_event(name, role, revision=revision), 0)


def share_of(router: Router, revision: str, picks: list) -> float:
    chosen = [pick for pick in picks if f"-{revision}-" in pick.decode.instance]
    return len(chosen) / len(picks)


def test_revisions_side_by_side_take_turns_when_idle_each_by_its_size(registry, make_event) -> None:
    make_revisions(registry, make_event, old=(3, 3), new=(1, 1))
    router, picks = Router(registry), []
    for _ in range(400):
        picks.append(router.pick("m", 100, 100))
        router.release(picks[-1])
    assert share_of(router, "new", picks) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("new", "least", "most"),
    [((1, 1), 0.2, 0.3), ((2, 1), 0.2, 0.4), ((1, 3), 0.2, 0.35), ((3, 3), 0.45, 0.55)],
)
def test_a_revision_gets_what_its_scarcer_phase_can_carry(
    registry, make_event, new: tuple[int, int], least: float, most: float
) -> None:
    """Beside three pairs of the old one, under load: each turn brings a request, each prefill
    instance computes a third of one, streams last 160 turns.
    """
    make_revisions(registry, make_event, old=(3, 3), new=new)
    router, picks = Router(registry), []
    queues: dict[str, list] = {}
    for turn in range(2_000):
        picks.append(router.pick("m", 500, 200))
        queues.setdefault(picks[-1].prefill.instance, []).append(picks[-1])
        for queue in queues.values() if turn % 3 == 0 else ():
            if queue:
                router.release(queue.pop(0), RequestPhase.PREFILL)
        if turn >= 160:
            router.release(picks[turn - 160], RequestPhase.DECODE)
    assert least <= share_of(router, "new", picks[400:]) <= most


def test_an_empty_new_revision_does_not_draw_more_prompts_than_it_can_take(
    registry, make_event, loaded
) -> None:
    make_revisions(registry, make_event, old=(1, 1), new=(1, 1))
    registry.on_event("d-old-0", loaded("d-old-0", blocks_used=900), 0)
    router = Router(registry)
    picks = [router.pick("m", 500, 200) for _ in range(12)]
    assert 0.5 < share_of(router, "new", picks) < 1


def test_the_obstacle_distinguishes_a_silent_instance_from_a_lost_one(fleet_of) -> None:
    registry = fleet_of(d1="decode", d2="decode")
    registry.update_connectivity(11.0)
    registry.on_disconnect("d2")
    obstacle = Router(registry).explain_unavailable("m")
    assert "d1 (decode): silent; d2 (decode): connection lost" in obstacle


def test_the_obstacle_is_named_and_empty_when_there_is_none(fleet_of) -> None:
    router = Router(fleet_of(p="prefill"), FallbackPolicy.NEVER)
    assert "p (prefill): ready" in router.explain_unavailable("m")
    assert "does not exist" in router.explain_unavailable("other")
    assert Router(fleet_of(d="decode")).explain_unavailable("m") == ""


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_in_flight_after_any_history(registry, make_event, loaded, seed: int) -> None:
    """Dispatches, releases, reports, restarts, flips and losses in any order."""
    rng = random.Random(seed)
    router, open_picks = Router(registry), []
    fleet = [f"i{n}" for n in range(6)]
    boots = dict.fromkeys(fleet, 0)
    for name in fleet:
        registry.on_event(name, make_event(name, rng.choice(["prefill", "decode", "mixed"])), 0)
    for step in range(400):
        name = rng.choice(fleet)
        event = rng.random()
        if event < 0.4:
            with contextlib.suppress(NoInstance):
                open_picks.append(router.pick("m", rng.randrange(5_000), rng.randrange(500)))
        elif event < 0.7 and open_picks:
            phase = rng.choice(list(RequestPhase))
            pick = rng.choice(open_picks)
            router.release(pick, phase)
        elif event < 0.8:
            report = loaded(name, rng.randrange(9_000), rng.randrange(900), f"{name}-{boots[name]}")
            registry.on_event(name, report, step)
        elif event < 0.9:
            boots[name] += rng.random() < 0.5
            role = rng.choice(["prefill", "decode", "mixed"])
            registry.on_event(name, make_event(name, role, boot_id=f"{name}-{boots[name]}"), step)
        elif event < 0.95:
            registry.on_disconnect(name)
        else:
            registry.update_connectivity(step)
    for pick in open_picks:
        router.release(pick)
    for name, instance in registry.instances.items():
        in_flight = instance.in_flight
        assert (in_flight.prompt.own, in_flight.resident.own, in_flight.num_requests) == (
            0,
            0,
            0,
        ), (
            seed,
            name,
        )
