"""PrefixAware believes in predicted cache hits as far as engines confirm them."""

import pytest

from cleave.router.router import Router

from tests.support.cached_prompts import (
    MIXED,
    add_queue,
    make_text,
    serve,
)


def report(router: Router, loaded, name: str, queries: int, hits: int) -> None:
    event = loaded(name, prefix_cache_queries=queries, prefix_cache_hits=hits)
    router.registry.on_event(name, event, router._clock())


def test_engines_without_prefix_cache_get_prompts_by_their_wait_alone(
    routed, loaded, clock
) -> None:
    router = routed(MIXED)
    text = make_text(1, 4_096)
    home, _ = serve(router, text)
    others = set(MIXED) - {home}
    report(router, loaded, home, 0, 0)
    for number in range(100):
        serve(router, text, excluded=others)
        clock.now_s += 1.0
        report(router, loaded, home, 4_096 * (number + 2), 0)
    assert serve(router, text, excluded=others)[1] > 4_000
    add_queue(router, home, 200)
    assert serve(router, text)[0] != home
    hits = router.registry.instances[home].hits
    assert hits.predicted_share == pytest.approx(1.0, rel=0.01), "the guess stays visible"
    assert hits.engine_share == 0


def test_predictions_count_as_much_as_the_engine_confirms(routed, loaded, clock) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 4_096)
    serve(router, text)
    report(router, loaded, "p1", 4_096, 0)
    for number in range(1, 101):
        serve(router, text)
        clock.now_s += 1.0
        report(router, loaded, "p1", 4_096 * (number + 1), 2_048 * number)
    assert serve(router, text)[1] == pytest.approx(2_048, abs=60)
    assert router.registry.instances["p1"].hits.engine_share == 0.5


def test_one_early_report_takes_no_trust_away(routed, loaded, clock) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 4_096)
    serve(router, text)
    report(router, loaded, "p1", 0, 0)
    for _ in range(20):
        serve(router, text)
    clock.now_s += 1.0
    # Most of these prompts are computed, and their lookups not yet reported.
    report(router, loaded, "p1", 4_096, 0)
    assert serve(router, text)[1] == 0
    clock.now_s += 1.0
    report(router, loaded, "p1", 15 * 4_096, 0)
    assert serve(router, text)[1] < 300, "one judgment counts little"


def test_counts_of_an_engine_that_fall_or_overflow_keep_trust_between_0_and_1(
    routed, loaded, clock
) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 4_096)
    for queries, hits in ((0, 0), (1 << 63, 1 << 63), (0, 0), (40_000, 1 << 63), (80_000, 0)):
        report(router, loaded, "p1", queries, hits)
        for _ in range(20):
            serve(router, text)
        clock.now_s += 10.0
        assert 0.0 <= router.registry.instances["p1"].hits.trust <= 1.0


def test_agents_that_report_no_hits_are_believed_to_have_a_cache(routed, loaded, clock) -> None:
    router = routed({"p1": "prefill", "d1": "decode"})
    text = make_text(1, 4_096)
    for _ in range(60):
        serve(router, text)
        clock.now_s += 1.0
        router.registry.on_event("p1", loaded("p1"), clock.now_s)
    assert serve(router, text)[1] == 0
    assert router.registry.instances["p1"].hits.engine_share is None
