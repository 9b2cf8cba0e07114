"""What each policy picks, and what a pick learns from."""

import random
from collections import Counter

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.prefix_cache import FIRST_BLOCK_BYTES
from cleave.router.errors import NoInstance
from cleave.router.iteration_time_fit import IterationTimeEstimator, PromptBatch
from cleave.router.registry import InstanceRegistry
from cleave.router.router import RequestPhase, Router, RoutingRules
from cleave.router.routing_request import CachedPrompt
from cleave.rpc.v1 import agent_pb2

from tests.support.doubles import Clock


@pytest.fixture
def routed(make_event, clock):
    """A router with a policy over `name=role` instances."""

    def make(policy: DispatchPolicy, rules: RoutingRules | None = None, **roles: str) -> Router:
        registry = InstanceRegistry(policy)
        for name, role in roles.items():
            registry.on_event(name, make_event(name, role), 0.0)
        return Router(registry, rules=rules, clock=clock, seed=5)

    return make


def names(pick) -> tuple[str | None, str]:
    return pick.prefill.instance if pick.prefill else None, pick.decode.instance


def prefills(router: Router, count: int, **request: object) -> Counter[str]:
    return Counter(router.pick("m", 100, **request).prefill.instance for _ in range(count))


FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_every_policy_picks_pairs_over_all_instances_and_leaves_nothing_in_flight(
    routed, policy: DispatchPolicy
) -> None:
    rng = random.Random(3)
    router = routed(policy, RoutingRules(ttft_ms=2_000, tpot_ms=50), **FOUR)
    seen, running = set(), []
    for _ in range(200):
        running.append(router.pick("m", rng.randint(1, 2_000), rng.randint(1, 500)))
        seen.update(names(running[-1]))
        if len(running) > 10:
            router.release(running.pop(rng.randrange(len(running))))
    for pick in running:
        router.release(pick)
    assert seen == set(FOUR)
    for instance in router.registry.instances.values():
        in_flight = instance.in_flight
        assert (in_flight.prompt.own, in_flight.resident.own) == (0, pytest.approx(0))
        assert (in_flight.num_requests, in_flight.num_heavy, in_flight.weighted_context) == (
            0,
            0,
            pytest.approx(0),
        )
        assert not in_flight.decoding_requests


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_no_policy_picks_what_is_excluded(routed, policy: DispatchPolicy) -> None:
    router = routed(policy, **FOUR)
    picks = [router.pick("m", 100, excluded={"p1", "d2"}) for _ in range(20)]
    assert {names(pick) for pick in picks} == {("p2", "d1")}
    with pytest.raises(NoInstance):
        router.pick("m", 100, colocated=True, excluded=set(FOUR))


def test_round_robin_ignores_load(routed) -> None:
    router = routed(DispatchPolicy.ROUND_ROBIN, **FOUR)
    router.pick("m", 1_000_000)
    assert prefills(router, 4) == {"p1": 2, "p2": 2}


def test_the_shortest_queue_counts_requests(routed) -> None:
    router = routed(DispatchPolicy.LEAST_REQUESTS, **FOUR)
    router.pick("m", 1_000_000)
    assert prefills(router, 1) == {"p2": 1}
    assert prefills(router, 2) == {"p1": 1, "p2": 1}


def test_the_shortest_wait_sees_that_a_prompt_is_half_computed(routed, clock) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    first = router.pick("m", 4_000)
    clock.now_s += 0.3
    second = router.pick("m", 2_000)
    assert (first.prefill.instance, second.prefill.instance) == ("p1", "p2")
    # 0.1 ms a token: p1 has 100 ms left, p2 200, though p1 holds more tokens.
    assert router.pick("m", 100).prefill.instance == "p1"


def test_the_shortest_wait_learns_how_fast_each_instance_is(routed, clock) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    for _ in range(40):
        pick = router.pick("m", 1_000)
        clock.now_s += 0.02 if pick.prefill.instance == "p1" else 0.2
        router.release(pick, RequestPhase.PREFILL)
        router.release(pick)
    assert prefills(router, 22)["p1"] > 16


def test_a_cached_beginning_draws_a_prompt_until_the_queue_costs_more(routed) -> None:
    router = routed(DispatchPolicy.PREFIX_AWARE, **FOUR)
    text = b"x" * FIRST_BLOCK_BYTES * 4 + b"]"
    home = router.pick("m", 8 * 128, text=text).prefill.instance
    other = "p2" if home == "p1" else "p1"
    instances = router.registry.instances
    instances[home].in_flight.prompt.remove(8 * 128)
    router.registry.refresh(instances[home])
    router.pick("m", 50, text=b"")
    router.pick("m", 50, text=b"")
    again = router.pick("m", 8 * 128 + 10, text=text)
    assert again.prefill.instance == home
    assert again._prefill_entry[2] < 1, "only what is not cached waits"
    instances[home].in_flight.prompt.add(9 * 128)
    router.registry.refresh(instances[home])
    assert router.pick("m", 8 * 128, text=text).prefill.instance == other


def test_an_engine_that_restarts_has_cached_nothing(routed, make_event) -> None:
    router = routed(DispatchPolicy.PREFIX_AWARE, **FOUR)
    text = b"x" * FIRST_BLOCK_BYTES * 4
    pick = router.pick("m", 1_000, text=text)
    name = pick.prefill.instance
    router.release(pick)
    router.registry.on_event(name, make_event(name, "prefill", boot_id="another"), 0.0)
    again = router.pick("m", 1_000, text=text)
    assert again._prefill_entry[2] == 1_000


def test_a_session_comes_back_unless_that_takes_longer(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    homes = {}
    for number in range(20):
        session = b"s%d" % number
        pick = router.pick("m", 100, session=session)
        homes[session] = pick.prefill.instance
        router.release(pick)
    assert set(homes.values()) == {"p1", "p2"}
    for session, home in homes.items():
        router.release(again := router.pick("m", 100, session=session))
        assert again.prefill.instance == home
    session = next(each for each, home in homes.items() if home == "p1")
    router.registry.instances["p1"].in_flight.prompt.add(5_000)
    router.registry.refresh(router.registry.instances["p1"])
    assert router.pick("m", 100, session=session).prefill.instance == "p2"


def test_heavy_decodes_are_spread(routed) -> None:
    router = routed(DispatchPolicy.LEAST_HEAVY, **FOUR)
    picks = [router.pick("m", 10, 1_000 if n % 2 else 10) for n in range(8)]
    heavy = Counter(pick.decode.instance for pick in picks[1::2])
    assert set(heavy) == {"d1", "d2"}


def teach(router: Router, clock: Clock, size: int, prompt_s: float = 0.0) -> None:
    """Prompts of 5 ms and 0.1 ms a token; iterations of 15 ms and a bit for each request and its
    context. `prompt_s`: by which each token of a prompt holds up the others."""
    for number in range(120):
        picks = [router.pick("m", 100 + number * 97 % 900, 500) for _ in range(size + number % 5)]
        for pick in picks:
            clock.now_s += 0.005 + 0.0001 * pick.prompt_tokens
            router.release(pick, RequestPhase.PREFILL)
        clock.now_s += 10.0
        for pick in picks:
            in_flight = router.registry.instances[pick.decode.instance].in_flight
            seconds = clock.now_s - pick.decoding_since
            before = pick.decoding_before
            batch, context = in_flight.compute_mean_decoding(before, seconds, clock.now_s)
            own_s = seconds - prompt_s * (in_flight.computed_tokens - pick.prompts_before)
            step_s = 0.015 + 0.0005 * batch + 1e-6 * context
            router.observe_completion(pick, 1 + round(own_s / step_s))
        for pick in picks:
            router.release(pick)


def test_a_request_counts_with_the_mean_of_what_decoded_beside_it(routed, clock) -> None:
    router = routed(DispatchPolicy.BEST_FIT, RoutingRules(ttft_ms=2_000, tpot_ms=30), m1="mixed")
    in_flight = router.registry.instances["m1"].in_flight
    first, second, waiting = (router.pick("m", tokens, 100) for tokens in (1_000, 400, 9_000))
    router.release(first, RequestPhase.PREFILL)
    since = clock.now_s
    clock.now_s += 4.0
    router.release(second, RequestPhase.PREFILL)
    clock.now_s += 4.0
    router.release(second)
    clock.now_s += 2.0
    found = in_flight.compute_mean_decoding(first.decoding_before, clock.now_s - since, clock.now_s)
    assert found == pytest.approx((1.4, 1_050 + 0.4 * 450)), "not the one whose prompt waits"
    router.release(first)
    router.release(waiting)
    assert (in_flight.num_decoding, in_flight.decoding_context) == (0, 0.0)


def test_iteration_times_are_learned_without_the_prompts_in_between(routed, clock) -> None:
    router = routed(DispatchPolicy.BEST_FIT, RoutingRules(ttft_ms=2_000, tpot_ms=30), m1="mixed")
    teach(router, clock, 2, prompt_s=0.0001)
    model = router._iteration_times.best_fit
    assert model.coefficients.k1 == pytest.approx(0.1, rel=0.01)
    assert model.coefficients.predict_decode_ms(4, 2_000) == pytest.approx(19, rel=0.02)


def test_prompts_of_one_iteration_are_one_sample_of_it(routed, clock) -> None:
    router = routed(DispatchPolicy.BEST_FIT, RoutingRules(ttft_ms=2_000, tpot_ms=30), m1="mixed")
    for number in range(200):
        picks = [router.pick("m", 100 + number * 97 % 900, 100) for _ in range(1 + number % 2)]
        clock.now_s += 0.02 + 0.0001 * sum(pick.prompt_tokens for pick in picks)
        for pick in picks:
            clock.now_s += 0.00001
            router.release(pick, RequestPhase.PREFILL)
        for pick in picks:
            router.release(pick)
    assert router._iteration_times._model.prefill.solve() == pytest.approx((0.1, 20), rel=0.01)


def test_a_prompt_that_took_very_long_hides_few_samples() -> None:
    estimator, batch = IterationTimeEstimator(2_000, 30), PromptBatch()
    for ms in (0.0, 20_000.0, *[100.0] * 50):
        estimator.add_prompt(batch, 1_000, ms)
    assert estimator._model.prefill.num_samples > 35


def test_best_fit_fills_one_instance_before_the_next_once_it_knows_the_passes(
    routed, clock
) -> None:
    router = routed(DispatchPolicy.BEST_FIT, RoutingRules(ttft_ms=2_000, tpot_ms=30), **FOUR)
    spread = Counter(router.pick("m", 100, 100).decode.instance for _ in range(6))
    assert spread == {"d1": 3, "d2": 3}, "it knows nothing yet"
    teach(router, clock, 8)
    counts = Counter(router.pick("m", 100, 100).decode.instance for _ in range(6))
    assert len(counts) == 1
    counts = Counter(router.pick("m", 100, 100).decode.instance for _ in range(30))
    assert len(counts) == 2, "a pass would take too long"


def test_short_prompts_go_whole_while_prefill_instances_are_busy(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, RoutingRules(short_prompt_tokens=200), **FOUR)
    assert router.pick("m", 150).reason == "disaggregated", "nothing waits"
    for _ in range(2):
        router.pick("m", 5_000)
    short = router.pick("m", 150)
    assert (short.prefill, short.reason) == (None, "short-prompt")
    assert router.pick("m", 201).reason == "disaggregated"
    for _ in range(20):
        router.pick("m", 150)
    for name in ("d1", "d2"):
        assert router.registry.instances[name].in_flight.prompt.own in (0, 150), "one at a time"


def test_another_plans_limit_of_short_prompts_counts_from_now_on(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    for _ in range(2):
        router.pick("m", 5_000)
    assert router.pick("m", 150).reason == "disaggregated"
    router.set_short_prompt_tokens(200)
    assert router.pick("m", 150).reason == "short-prompt"
    router.set_short_prompt_tokens(0)
    assert router.pick("m", 150).reason == "disaggregated"


def test_prompts_wait_at_prefill_instances_before_mixed_ones_take_them(routed) -> None:
    fleet = {"p1": "prefill", "d1": "decode", "m1": "mixed"}
    eager = routed(DispatchPolicy.SHORTEST_WAIT, **fleet)
    eager.pick("m", 1_000)
    assert names(eager.pick("m", 1_000)) == (None, "m1")
    # 0.1 ms for a token, before anything is learned.
    patient = routed(DispatchPolicy.SHORTEST_WAIT, RoutingRules(headroom_ms=250), **fleet)
    assert prefills(patient, 26) == {"p1": 26}
    assert names(patient.pick("m", 100)) == (None, "m1")


def test_mixed_instances_help_where_prompts_take_the_same_time_at_any_length(
    routed,
) -> None:
    fleet = {"p1": "prefill", "d1": "decode", "m1": "mixed"}
    router = routed(DispatchPolicy.SHORTEST_WAIT, RoutingRules(headroom_ms=250), **fleet)
    queue = router.registry.instances["p1"].in_flight.queue
    for number in range(2_000):
        queue.observe_completion((100, 500)[number % 2], 50.0 * (number + 1))
    assert queue.token_ms < 0.002, "nearly all of it is the fixed time of a prompt"
    assert [names(router.pick("m", 300))[0] for _ in range(6)] == ["p1"] * 6, "50 ms each"
    assert names(router.pick("m", 300)) == (None, "m1")


def test_predictions_come_from_answers_not_from_limits(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    for _ in range(50):
        pick = router.pick("m", 100, 4_000)
        router.observe_completion(pick, 20)
        router.release(pick)
    assert router.pick("m", 100, 4_000).output_tokens == pytest.approx(20, rel=0.2)


def follow(router: Router, num_routers: int, rank: int, **pending: int) -> None:
    for name in FOUR:
        load = agent_pb2.LoadReport(
            boot_id=f"{name}-boot",
            pending_prompt_tokens=pending.get(name, 0),
            kv_blocks_free=1_000,
            num_routers=num_routers,
            router_rank=rank,
        )
        router.registry.on_event(name, agent_pb2.WatchEvent(load=load), 0.0)


@pytest.mark.parametrize("policy", [DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.PENDING_TOKENS])
def test_routers_that_share_a_fleet_prefer_instances_of_their_own(routed, policy) -> None:
    picked = []
    for rank in range(2):
        router = routed(policy, **FOUR)
        follow(router, 2, rank)
        picked.append(names(router.pick("m", 100)))
        assert names(router.pick("m", 100)) != picked[-1], "one prompt ahead is enough to leave"
    assert picked == [("p1", "d1"), ("p2", "d2")]


def test_a_router_left_alone_has_all_instances(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    follow(router, 2, 1)
    follow(router, 1, 0)
    picks = []
    for _ in range(4):
        router.release(pick := router.pick("m", 100))
        picks.append(names(pick))
    assert picks == [("p1", "d1"), ("p2", "d2")] * 2


@pytest.fixture
def celled(routed, make_event):
    """Like `routed`, with the instances of FOUR in two cells, and further fields of them."""

    def make(
        policy: DispatchPolicy,
        rules: RoutingRules | None = None,
        **router_fields: dict[str, object],
    ) -> Router:
        router = routed(policy, rules, **FOUR)
        for name, role in FOUR.items():
            fields = {"cell": name[-1], **router_fields.get(name, {})}
            router.registry.on_event(name, make_event(name, role, **fields), 0.0)
        return router

    return make


DRAINS = {"state": agent_pb2.STATE_DRAINING}


@pytest.mark.parametrize("session", [None, b"s"])
@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_under_every_policy_pairs_stay_in_their_cell(
    celled, policy: DispatchPolicy, session
) -> None:
    rng = random.Random(3)
    router = celled(policy, RoutingRules(ttft_ms=2_000, tpot_ms=50))
    seen, running = Counter(), []
    for _ in range(200):
        running.append(
            router.pick("m", rng.randint(1, 2_000), rng.randint(1, 500), session=session)
        )
        seen[names(running[-1])] += 1
        assert running[-1].reason == "disaggregated"
        if len(running) > 10:
            router.release(running.pop(rng.randrange(len(running))))
    assert set(seen) == {("p1", "d1"), ("p2", "d2")}


def test_routers_that_share_a_fleet_keep_pairs_in_their_cell(celled) -> None:
    router = celled(DispatchPolicy.SHORTEST_WAIT)
    follow(router, 2, 1)
    picks = {names(router.pick("m", 100)) for _ in range(20)}
    assert picks == {("p1", "d1"), ("p2", "d2")}


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_handoffs_leave_a_cell_without_decode_instance_and_are_counted(
    celled, policy: DispatchPolicy
) -> None:
    router = celled(policy, d1=DRAINS, p2=DRAINS)
    pick = router.pick("m", 100)
    assert (names(pick), pick.reason) == (("p1", "d2"), "cross-cell")


def test_a_decode_instance_without_a_verified_path_is_none_for_its_cell(celled) -> None:
    router = celled(DispatchPolicy.SHORTEST_WAIT, d1={"verified": False}, p2=DRAINS)
    assert names(router.pick("m", 100)) == ("p1", "d2")
    router = celled(DispatchPolicy.SHORTEST_WAIT, d1=DRAINS, d2={"verified": False})
    assert router.pick("m", 100).reason == "no-prefill"


@pytest.mark.parametrize("policy", [DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.PENDING_TOKENS])
def test_whole_cells_go_first_until_their_queue_is_longer_than_the_prompt(celled, policy) -> None:
    router = celled(policy, d1=DRAINS)
    picks = [router.pick("m", tokens) for tokens in (500, 1_000, 1_000)]
    assert [names(pick) for pick in picks] == [("p2", "d2"), ("p2", "d2"), ("p1", "d2")]
    assert [pick.reason for pick in picks] == ["disaggregated", "disaggregated", "cross-cell"]


def test_a_request_that_lost_its_decode_instance_may_leave_the_cell(celled) -> None:
    router = celled(DispatchPolicy.SHORTEST_WAIT, p2=DRAINS)
    assert names(router.pick("m", 100)) == ("p1", "d1")
    assert names(router.pick("m", 100, excluded={"d1"})) == ("p1", "d2")


def test_cells_share_requests_by_what_their_decode_instances_hold(celled, loaded) -> None:
    router = celled(DispatchPolicy.SHORTEST_WAIT)
    router.registry.on_event("d1", loaded("d1", blocks_used=900), 0.0)
    picks = []
    for _ in range(10):
        picks.append(pick := router.pick("m", 100))
        router.release(pick, RequestPhase.PREFILL)
    assert {names(pick) for pick in picks} == {("p2", "d2")}


def test_cells_of_a_fleet_that_states_none_do_not_matter(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    assert all(table.cells is None for table in router.registry.models["m"].score_tables)
    router.registry.instances["d1"].in_flight.resident.add(9_000)
    router.registry.refresh(router.registry.instances["d1"])
    pick = router.pick("m", 100)
    assert (names(pick), pick.reason) == (("p1", "d2"), "disaggregated")


CACHED = CachedPrompt("p2-boot", 300)


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_a_prompt_that_was_computed_before_goes_back_under_any_policy(routed, policy) -> None:
    router = routed(policy, **FOUR)
    assert prefills(router, 3, cached=CachedPrompt("p2-boot", 100_000)) == {"p2": 3}


def test_going_back_is_worth_as_many_tokens_of_queue_as_are_cached_there(routed) -> None:
    router = routed(DispatchPolicy.PENDING_TOKENS, **FOUR)
    waits = router.pick("m", 301, excluded={"p1"})
    assert prefills(router, 1, cached=CACHED) == {"p1": 1}
    router.release(waits)
    router.pick("m", 299, excluded={"p1"})
    assert prefills(router, 1, cached=CACHED) == {"p2": 1}


def test_only_what_is_not_cached_counts_as_load(routed) -> None:
    router = routed(DispatchPolicy.PENDING_TOKENS, **FOUR)
    router.pick("m", 340, cached=CACHED)
    assert router.registry.instances["p2"].in_flight.prompt.own == 40


@pytest.mark.parametrize("excluded", [{"p2"}, {"p2", "d1"}])
def test_an_excluded_instance_gets_no_returning_prompt(routed, excluded) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, **FOUR)
    assert prefills(router, 2, cached=CACHED, excluded=excluded) == {"p1": 2}


def test_an_engine_that_was_started_again_has_nothing_cached(routed) -> None:
    router = routed(DispatchPolicy.SHORTEST_WAIT, p1="prefill", p2="prefill", d1="decode")
    assert prefills(router, 2, cached=CachedPrompt("p2-boot-before", 300)) == {"p1": 1, "p2": 1}
