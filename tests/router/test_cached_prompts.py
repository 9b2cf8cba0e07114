"""Prompts whose beginning is pulled from the prefix cache of another instance."""

from collections.abc import Callable

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.prefix_cache import CLOCK_TOKENS
from cleave.router.pair_proofs import PairResult
from cleave.router.registry import STALE_S, InstanceRegistry
from cleave.router.router import RequestPhase, Router
from cleave.rpc.v1 import agent_pb2

from tests.router.test_selection_by_caches import add_queue, make_text, send

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
LINK_TOKEN_MS = 0.01
"""A tenth of what computing takes before anything is learned."""
OUTPUT_TOKENS = 100


@pytest.fixture
def routed(make_event, clock) -> Callable[..., Router]:
    """A router over instances whose caches can be pulled from, and that have measured a rate."""

    def make(
        token_ms: float = LINK_TOKEN_MS, prefix_port: int = 5_000, roles: dict[str, str] = ROLES
    ) -> Router:
        registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
        path = agent_pb2.KvPath(verified=True, token_ms=token_ms)
        for name, role in roles.items():
            event = make_event(name, role, prefix_port=prefix_port, kv_path=path)
            registry.on_event(name, event, 0.0)
        return Router(registry, clock=clock, seed=5)

    return make


def serve(router: Router, text: bytes) -> tuple[str, str, str, float]:
    """(prefill, decode, source, tokens to compute) of a request that ends at once."""
    pick = send(router, text)
    computed = round(pick._prefill_entry[2])
    router.observe_completion(pick, OUTPUT_TOKENS)
    router.release(pick)
    source = pick.source.instance if pick.source is not None else ""
    return pick.prefill.instance, pick.decode.instance, source, computed


def test_where_the_prefix_has_a_queue_another_instance_pulls_it(routed) -> None:
    router, text = routed(), make_text(1, 1_024)
    home, decode, source, _ = serve(router, text)
    assert source == ""
    add_queue(router, home, 200)
    other, _, source, computed = serve(router, text)
    assert (other != home, computed) == (True, 0)
    assert source in (home, decode)
    pick = send(router, text)
    assert pick.source is not None, "in case that it has evicted it"
    assert (pick.prefill.instance, pick._pulled) == (other, 0.0)


def test_the_next_turn_pulls_the_answer_from_the_decode_instance(routed) -> None:
    router, text = routed(), make_text(1, 1_024)
    home, decode, _, _ = serve(router, text)
    longer = text[:-1] + make_text(2, 500)
    again, _, source, computed = serve(router, longer)
    assert (again, source) == (home, decode)
    # 500 new tokens, of which those of the answer lie there, and half of a block here.
    assert computed == pytest.approx(500 - OUTPUT_TOKENS - 128, abs=2)


@pytest.mark.parametrize(
    ("token_ms", "port"), [(0.2, 5_000), (0.0, 5_000), (LINK_TOKEN_MS, 0)],
    ids=["slow link", "not measured", "not supported"],
)  # fmt: skip
def test_nothing_is_pulled_that_is_computed_in_less_time(routed, token_ms, port) -> None:
    router, text = routed(token_ms, port), make_text(1, 1_024)
    home, _, _, _ = serve(router, text)
    add_queue(router, home, 2_000)
    other, _, source, computed = serve(router, text)
    assert (other != home, source, computed) == (True, "", 1_024)


def test_a_source_that_has_restarted_is_none(routed, make_event) -> None:
    router, text = routed(), make_text(1, 1_024)
    serve(router, text)
    path = agent_pb2.KvPath(verified=True, token_ms=LINK_TOKEN_MS)
    for name, role in ROLES.items():
        event = make_event(name, role, boot_id=f"{name}-2", prefix_port=5_000, kv_path=path)
        router.registry.on_event(name, event, 0.0)
    _, _, source, computed = serve(router, text)
    assert (source, computed) == ("", 1_024)


def test_a_source_that_is_silent_or_drains_is_none(routed, make_event) -> None:
    router, text = routed(), make_text(1, 1_024)
    _, decode, _, _ = serve(router, text)
    longer = text[:-1] + make_text(2, 500)
    path = agent_pb2.KvPath(verified=True, token_ms=LINK_TOKEN_MS)
    now = STALE_S + 1.0
    for name, role in ROLES.items():
        if name != decode:
            event = make_event(name, role, prefix_port=5_000, kv_path=path)
            router.registry.on_event(name, event, now)
    router.registry.update_connectivity(now)
    assert serve(router, longer)[2] != decode
    state = agent_pb2.STATE_DRAINING
    event = make_event(decode, "decode", prefix_port=5_000, kv_path=path, state=state)
    router.registry.on_event(decode, event, now)
    assert serve(router, longer)[2] != decode


def test_a_source_of_a_pair_with_wrong_handoffs_is_none(routed, clock) -> None:
    router, text = routed(), make_text(1, 1_024)
    home, decode, _, _ = serve(router, text)
    result = PairResult(home, agent_pb2.TRUST_FAILED, clock.now_s, source="w", sequence=1)
    registry = router.registry
    registry.record_pair(registry.instances[decode], f"{home}-boot", result, clock.now_s)
    again, other, source, _ = serve(router, text[:-1] + make_text(2, 500))
    assert (again, other != decode) == (home, True)
    assert source != decode


def test_another_tenant_pulls_nothing(routed) -> None:
    router, text = routed(), make_text(1, 1_024)
    pick = send(router, text, salt=b"one")
    home = pick.prefill.instance
    router.observe_completion(pick, OUTPUT_TOKENS)
    router.release(pick)
    add_queue(router, home, 2_000)
    assert send(router, text, salt=b"other").source is None
    assert send(router, text, salt=b"one").source is not None


def test_what_is_not_computed_is_no_source(routed) -> None:
    router, text = routed(), make_text(1, 1_024)
    router.release(send(router, text))
    assert send(router, text).source is None


def test_the_time_of_a_pulled_prompt_teaches_nothing(routed, clock) -> None:
    router, text = routed(), make_text(1, 1_024)
    home, _, _, _ = serve(router, text)
    add_queue(router, home, 2_000)
    pick = send(router, text[:-1] + make_text(2, 500))
    assert pick.source is not None
    queue = router.registry.instances[pick.prefill.instance].in_flight.queue
    before = queue.token_ms
    clock.now_s += 5.0
    router.release(pick, RequestPhase.PREFILL)
    assert queue.token_ms == before
    assert queue.head_started_ms == pytest.approx(clock.now_s * 1000)


def test_what_is_pulled_is_written_to_the_cache_as_well(routed) -> None:
    router, text = routed(), make_text(1, 1_024)
    home, _, _, _ = serve(router, text)
    add_queue(router, home, 2_000)
    other = router.registry.instances["p2" if home == "p1" else "p1"]
    before = other.in_flight.read_clock()
    assert serve(router, text)[3] == 0
    assert other.in_flight.read_clock() - before == 1_024 // CLOCK_TOKENS


def test_a_request_on_one_instance_pulls_nothing(routed) -> None:
    router = routed(roles={"m1": "mixed", "m2": "mixed"})
    text = make_text(1, 1_024)
    pick = send(router, text)
    router.observe_completion(pick, OUTPUT_TOKENS)
    router.release(pick)
    add_queue(router, pick.decode.instance, 2_000)
    assert send(router, text).source is None
