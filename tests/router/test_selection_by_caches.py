"""PrefixAware: one cost of waiting and computing."""

import random
from collections import Counter

import pytest

from cleave.policy.prefix_cache import FIRST_BLOCK_BYTES, MAX_DETECTORS, hash_first_block
from cleave.router.prefix_index import PrefixMemory
from cleave.router.router import RequestPhase, RoutingRules
from cleave.router.shared_load import SharedLoad, build_table
from cleave.rpc.v1 import agent_pb2

from tests.support.cached_prompts import (
    MIXED,
    add_queue,
    first_instance,
    make_text,
    send,
    serve,
)

SPLIT = {"p1": "prefill", "p2": "prefill", "p3": "prefill", "d1": "decode"}


@pytest.mark.parametrize("roles", [SPLIT, MIXED])
def test_the_turns_of_conversations_stay_where_they_were_computed(routed, roles) -> None:
    router = routed(roles)
    texts = {number: make_text(number, 1_000) for number in range(12)}
    homes = {number: serve(router, text)[0] for number, text in texts.items()}
    assert set(homes.values()) == {name for name, role in roles.items() if role != "decode"}
    for turn in range(1, 4):
        for number, text in texts.items():
            texts[number] = text = text[:-1] + make_text(100 * turn + number, 200)
            home, computed = serve(router, text)
            assert home == homes[number]
            assert computed <= 200 + 256


def test_a_long_queue_is_left_when_computing_again_takes_less_and_then_both_have_it(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    # 0.1 ms a token: computing it again takes 102 ms.
    add_queue(router, home, 1_000)
    assert serve(router, text) == (home, 0)
    add_queue(router, home, 40)
    other, computed = serve(router, text)
    assert (other != home, computed) == (True, 1_024)
    assert serve(router, text) == (other, 0)


def test_what_is_cached_in_part_is_worth_that_part(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    half = text[: len(text) // 2 + 1]
    home, _ = serve(router, half)
    # 512 tokens, and half of the next block.
    add_queue(router, home, 630)
    assert serve(router, text) == (home, 384)
    router = routed(SPLIT)
    assert serve(router, half)[0] == home
    add_queue(router, home, 650)
    assert serve(router, text)[0] != home


def test_an_instance_whose_times_do_not_follow_the_tokens_attracts_no_more_than_others(
    routed,
) -> None:
    router = routed(MIXED)
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    router.registry.instances[home].in_flight.queue.token_ms = 0.0
    add_queue(router, home, 900)
    assert serve(router, text) == (home, 0)
    add_queue(router, home, 200)
    assert serve(router, text)[0] != home


def test_of_two_that_have_it_the_one_with_the_shorter_queue_computes_it(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    other, _ = serve(router, text, excluded={home})
    add_queue(router, home, 300)
    assert serve(router, text) == (other, 0)
    add_queue(router, other, 400)
    assert serve(router, text) == (home, 0)


def test_one_that_has_less_of_it_wins_if_its_queue_is_shorter_by_more(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    all_of_it, _ = serve(router, text)
    half_of_it, _ = serve(router, text[: len(text) // 2 + 1], excluded={all_of_it})
    (nothing,) = {"p1", "p2", "p3"} - {all_of_it, half_of_it}
    add_queue(router, all_of_it, 600)
    assert serve(router, text) == (half_of_it, 384)
    add_queue(router, all_of_it, 900)
    add_queue(router, half_of_it, 1_100)
    assert serve(router, text)[0] == nothing, "by now both have all of it, and long queues"


def test_blocks_are_forgotten_once_the_kv_was_filled_with_others(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 1_000)
    serve(router, text)
    for number in range(14):  # of 16,000 tokens of KV
        serve(router, make_text(100 + number, 1_000))
    assert serve(router, text)[1] == 116
    for number in range(18):
        serve(router, make_text(200 + number, 1_000))
    assert serve(router, text)[1] == 1_000


def test_use_keeps_blocks_cached(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 1_000)
    serve(router, text)
    for number in range(60):
        serve(router, make_text(100 + number, 1_000))
        if number % 8 == 7:
            assert serve(router, text)[1] == 116


def test_answers_fill_the_kv_of_the_instance_that_generates_them(routed) -> None:
    for roles, computed in (({"m1": "mixed"}, 1_024), ({"p1": "prefill", "d1": "decode"}, 0)):
        router = routed(roles)
        text = make_text(1, 1_024)
        serve(router, text)
        for number in range(90):
            serve(router, make_text(number + 9, 128)[:500])
        assert serve(router, text)[1] == computed


def test_an_engine_that_restarts_has_cached_nothing(routed, make_event) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 1_024)
    serve(router, text)
    assert serve(router, text)[1] == 0
    router.registry.on_event("p1", make_event("p1", "prefill", boot_id="another"), 0.0)
    assert serve(router, text)[1] == 1_024


def test_salts_keep_prompts_apart(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 1_024)
    for salt, computed in ((b"a", 1_024), (b"b", 1_024), (b"a", 0), (b"", 1_024), (b"b", 0)):
        assert serve(router, text, salt=salt)[1] == computed


def test_prompts_that_do_not_repeat_are_sampled_and_then_noticed_again(routed) -> None:
    router = routed(SPLIT)
    for number in range(1_000):
        serve(router, make_text(number, 256))
    index, texts = router._selector._index, [make_text(5_000 + n, 300) for n in range(100)]
    for text in texts:
        serve(router, text)
    seed = index.find_seed("m", b"")
    known = sum(index.contains(hash_first_block(text, seed)) for text in texts)
    assert 0 < known < 30
    for _ in range(8):
        for text in texts:
            serve(router, text)
    assert all(serve(router, text)[1] < 100 for text in texts)


def test_a_beginning_that_all_prompts_share_is_noticed_with_any_bytes(routed) -> None:
    router = routed(SPLIT)
    for number in range(1_000):
        serve(router, make_text(number, 300))
    begin = make_text(5_000, 300)[:-1]
    for byte in (0, 1):  # in no sample by its bytes, for at least one of them
        text = begin[:1_023] + bytes([byte]) + begin[1_024:]
        for number in range(400):
            serve(router, text + make_text(number, 200))
        assert serve(router, text + make_text(7_000, 200))[1] < 300


def test_prompts_below_a_block_cost_nothing_to_look_at(routed) -> None:
    router = routed(SPLIT)
    picks = [send(router, b"x" * FIRST_BLOCK_BYTES) for _ in range(3)]
    assert {first_instance(pick) for pick in picks} == {"p1", "p2", "p3"}


def test_a_session_is_where_its_prompts_are_assumed_to_be_cached(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    homes = {serve(router, make_text(n, 256), session=b"s%d" % n)[0] for n in range(20)}
    assert homes == {"p1", "p2", "p3"}, "sessions spread"
    home, _ = serve(router, text, session=b"one")
    assert serve(router, text[:-1] + make_text(2, 200), session=b"one")[0] == home
    # Elsewhere all of it is cached, and the pinned instance has a queue.
    (other, *_) = {"p1", "p2", "p3"} - {home}
    serve(router, text, excluded={"p1", "p2", "p3"} - {other})
    add_queue(router, home, 500)
    assert serve(router, text, session=b"one")[0] == other


def test_a_session_stays_where_nothing_waits_though_a_part_is_cached_elsewhere(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    home = serve(router, make_text(2, 100), session=b"one")[0]
    (other, *_) = {"p1", "p2", "p3"} - {home}
    serve(router, text, excluded={"p1", "p2", "p3"} - {other})
    add_queue(router, other, 10)
    longer = text[:-1] + make_text(3, 1_024)
    assert serve(router, longer)[0] == other
    again = text[:-1] + make_text(4, 1_024)
    assert serve(router, again, session=b"one")[0] == home


def test_an_adapter_is_loaded_where_it_has_computed_a_prompt(routed) -> None:
    router = routed(MIXED, adapters=["sql", "law"], max_adapters=1)
    text = make_text(1, 1_024)
    home = serve(router, make_text(2, 256), model="sql")[0]
    assert serve(router, text, model="sql")[0] == home
    (other, *_) = set(MIXED) - {home}
    serve(router, text, model="sql", excluded=set(MIXED) - {other})
    add_queue(router, home, 300)
    assert serve(router, text, model="sql") == (other, 0)


def test_a_prompt_that_a_decode_instance_has_cached_is_short_for_it(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"}, RoutingRules(short_prompt_tokens=200))
    text = make_text(1, 1_024)
    assert serve(router, text)[0] == "p1"
    add_queue(router, "p1", 5_000)
    pick = send(router, text[:-1] + make_text(2, 100))
    assert (pick.prefill, pick.reason) == (None, "short-prompt")
    pick = send(router, make_text(3, 1_124))
    assert pick.prefill.instance == "p1"


def test_hits_are_predicted_by_instance(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 1_024)
    for _ in range(4):
        serve(router, text)
    instances = router.registry.instances
    assert instances["p1"].in_flight.predict_hits() == pytest.approx(
        (4_096, 4_096, 3_072), rel=0.001
    )
    assert instances["d1"].in_flight.predict_hits() == (0, 0, 0)


def test_a_prompt_that_is_never_computed_does_not_draw_its_repetition(routed) -> None:
    router = routed(dict.fromkeys(("m1", "m2", "m3", "m4"), "mixed"))
    text = make_text(1, 4_096)
    picked = set()
    for _ in range(8):
        pick = send(router, text)
        picked.add(first_instance(pick))
        router.release(pick)
    assert len(picked) > 1
    # What was computed before stays known.
    holder, _ = serve(router, text)
    router.release(send(router, text))
    assert serve(router, text) == (holder, 0)


def test_gateways_of_one_fleet_send_first_copies_to_the_same_instance(routed, loaded) -> None:
    routers = [routed(MIXED) for _ in range(2)]
    for rank, router in enumerate(routers):
        for name in MIXED:
            report = loaded(name, num_routers=2, router_rank=rank)
            router.registry.on_event(name, report, 0.0)
        text = make_text(999, 512)
        for _ in range(100):
            serve(router, text)
    agree = [
        len({serve(router, make_text(number, 1_024))[0] for router in routers}) == 1
        for number in range(50)
    ]
    assert all(agree)
    for number in range(50):
        text = make_text(number, 1_024)
        homes = [serve(router, text)[0] for router in routers]
        for router, home in zip(routers, homes, strict=True):
            longer = text[:-1] + make_text(number + 100, 300)
            assert serve(router, longer)[0] == home, "what is known comes before what is expected"


def test_processes_of_one_gateway_share_what_they_know(routed) -> None:
    memory, table = PrefixMemory(), build_table(2)
    one, other = (
        routed(SPLIT, memory=memory, shared_load=SharedLoad(table.for_process(process)))
        for process in range(2)
    )
    text = make_text(1, 1_024)
    home, _ = serve(one, text)
    assert serve(other, text) == (home, 0)
    assert other.registry.instances[home].in_flight.predict_hits() == pytest.approx(
        (2_048, 2_048, 1_024), rel=0.001
    )
    heir = routed(SPLIT, memory=memory, shared_load=SharedLoad(table.for_process(1)))
    assert serve(heir, text) == (home, 0), "a process that replaces another one counts on"
    hits = heir.registry.instances[home].in_flight.predict_hits()
    assert hits == pytest.approx((3_072, 3_072, 2_048), rel=0.001)
    for number in range(18):
        serve(one, make_text(200 + number, 1_000), excluded=set(SPLIT) - {home, "d1"})
    assert serve(other, text)[1] == 1_024, "what one process has sent evicts what another has"


@pytest.mark.parametrize("roles", [SPLIT, MIXED])
@pytest.mark.parametrize("cells", [False, True])
def test_nothing_stays_in_flight_and_all_are_used(routed, make_event, clock, roles, cells) -> None:
    router = routed(roles)
    if cells:
        for name, role in roles.items():
            event = make_event(name, role, cell=f"c{name == 'p1'}")
            router.registry.on_event(name, event, 0.0)
    rng = random.Random(4)
    seen: Counter[str] = Counter()
    running = []
    for _ in range(400):
        clock.now_s += 0.01
        text = make_text(rng.randrange(40), 1_200)[: rng.randrange(400, 4_800)]
        excluded = {next(iter(roles))} if rng.random() < 0.1 else ()
        pick = send(router, text, excluded=excluded)
        seen[first_instance(pick)] += 1
        running.append(pick)
        if len(running) > 8:
            ended = running.pop(rng.randrange(len(running)))
            router.release(ended, RequestPhase.PREFILL)
            router.release(ended)
    for pick in running:
        router.release(pick)
    assert set(seen) == {name for name, role in roles.items() if role != "decode"}
    for instance in router.registry.instances.values():
        in_flight = instance.in_flight
        assert (in_flight.prompt.own, in_flight.resident.own) == pytest.approx((0, 0), abs=1e-6)


def test_an_agent_that_reports_no_kv_size_is_assumed_to_have_some(routed) -> None:
    router = routed(SPLIT)
    for instance in router.registry.instances.values():
        registration = agent_pb2.Registration()
        registration.CopyFrom(instance.registration)
        registration.kv_blocks_total = 0
        instance.registration = registration
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    assert serve(router, text) == (home, 0)


@pytest.mark.parametrize("ends", ["cancelled", "refused"])
def test_prompts_that_were_not_computed_do_not_age_what_is_cached(routed, ends) -> None:
    router = routed({"p1": "prefill", "d1": "decode"}, max_model_len=8_000)
    text = make_text(1, 1_024)
    serve(router, text)
    for number in range(5):
        # Each is longer than the whole KV.
        router.release(send(router, make_text(10 + number, 100_000)))
    assert serve(router, text)[1] == 0
    instance = router.registry.instances["p1"]
    assert instance.in_flight.predict_hits()[0] == pytest.approx(2_048), ends


def test_one_prompt_ages_a_cache_by_no_more_than_the_longest_that_the_engine_takes(routed) -> None:
    router = routed({"p1": "prefill", "d1": "decode"}, max_model_len=2_000)
    text = make_text(1, 1_024)
    serve(router, text)
    for number in range(6):  # of 16,000 tokens of KV
        serve(router, make_text(10 + number, 100_000))
    assert serve(router, text)[1] == 0


def test_an_overdue_instance_does_not_attract_all_that_it_has_cached(routed, clock) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    add_queue(router, home, 5_000)
    # 500 ms of work, and nothing has ended for ten seconds.
    clock.now_s += 10.0
    assert serve(router, text)[0] != home


def test_the_fixed_time_of_a_prompt_counts(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 1_024)
    home, _ = serve(router, text)
    queue = router.registry.instances[home].in_flight.queue
    queue.prompt_ms = 90.0
    assert serve(router, text) == (home, 0), "102 ms elsewhere"
    queue.prompt_ms = 110.0
    assert serve(router, text)[0] != home


def test_a_hot_prefix_is_cached_where_it_was_computed_and_nowhere_else(routed) -> None:
    roles = {f"m{number}": "mixed" for number in range(40)}
    router = routed(roles)
    text = make_text(1, 1_024)
    used = [f"m{number}" for number in range(20)]
    for name in used:
        assert serve(router, text, excluded=set(roles) - {name}) == (name, 1_024)
    assert serve(router, text)[1] == 0, "hot prefixes are found"
    for name in used:
        assert serve(router, text, excluded=set(roles) - {name}) == (name, 0)
    for number in range(20, 40):
        name = f"m{number}"
        assert serve(router, text, excluded=set(roles) - {name}) == (name, 1_024)


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_hot_prefix_is_used_where_the_wait_is_shortest_though_few_are_listed(
    routed, loaded, num_routers
) -> None:
    roles = {f"m{number}": "mixed" for number in range(12)}
    router = routed(roles)
    text = make_text(1, 1_024)
    for name in roles:
        serve(router, text, excluded=set(roles) - {name})
        router.registry.on_event(name, loaded(name, num_routers=num_routers), 0.0)
    for name in roles:
        others = set(roles) - {name}
        for other in others:
            add_queue(router, other, 3_000)
        assert serve(router, text) == (name, 0)
        for other in others:
            add_queue(router, other, -3_000)


def test_mixed_and_prefill_instances_are_compared_by_what_they_have_to_compute(routed) -> None:
    roles = {"p1": "prefill", "d1": "decode", "m1": "mixed"}
    for home in ("p1", "m1"):
        router = routed(roles)
        text = make_text(1, 1_024)
        serve(router, text, excluded={"p1", "m1"} - {home})
        add_queue(router, home, 500)
        assert serve(router, text) == (home, 0)
        add_queue(router, home, 600)
        assert serve(router, text)[0] != home


def test_revisions_are_compared_by_what_they_have_to_compute(routed, make_event) -> None:
    router = routed({})
    for name, revision in (("a", "one"), ("b", "two")):
        router.registry.on_event(name, make_event(name, "mixed", revision=revision), 0.0)
    text = make_text(1, 1_024)
    for home in ("a", "b"):
        other = {"a": "b", "b": "a"}[home]
        text = make_text(ord(home), 1_024)
        serve(router, text, excluded={other})
        for colocated in (False, True):
            assert serve(router, text, colocated=colocated) == (home, 0)


def test_one_tenants_new_prompts_leave_the_caches_of_others_in_use(routed) -> None:
    router = routed(SPLIT)
    for number in range(1_000):
        serve(router, make_text(number, 300), salt=b"busy")
    text = make_text(5_000, 1_024)
    serve(router, text, salt=b"calm")
    assert serve(router, text, salt=b"calm")[1] == 0


def test_a_majority_of_short_new_prompts_leaves_long_ones_that_repeat_in_use(routed) -> None:
    router = routed(SPLIT)
    text = make_text(5_000, 3_000)
    serve(router, text)
    for number in range(1_000):
        serve(router, make_text(number, 300))
        if number % 40 == 39:
            assert serve(router, text)[1] < 100


def test_requests_with_new_salts_take_bounded_memory(routed) -> None:
    router = routed(SPLIT)
    text = make_text(1, 256)
    for number in range(2 * MAX_DETECTORS):
        serve(router, text, salt=b"%d" % number)
    repeats = router._selector._repeats
    assert len(repeats._by_seed) == MAX_DETECTORS
    # One that comes later has a detector of its own, and its turns are found.
    picked = [serve(router, make_text(2, 4_000), salt=b"late")[1] for _ in range(3)]
    assert picked[-1] < picked[0]


def test_the_cost_of_a_cell_counts_once(routed, make_event) -> None:
    # p2 and p3 have other tokens in their cell's decode instance than p1: a tenth of them counts.
    router = routed({})
    roles = {**SPLIT, "d2": "decode"}
    for name, role in roles.items():
        event = make_event(name, role, cell=f"c{name in ('p1', 'd1')}")
        router.registry.on_event(name, event, 0.0)
    text = make_text(1, 1_024)
    serve(router, text, excluded={"p2", "p3"})
    instance = router.registry.instances["d1"]
    for tokens, home in ((9_000, {"p1"}), (3_000, {"p2", "p3"})):
        instance.in_flight.resident.add(tokens)
        router.registry.refresh(instance)
        router.registry.refresh(router.registry.instances["p1"])
        pick = send(router, text)
        router.release(pick)
        assert first_instance(pick) in home
