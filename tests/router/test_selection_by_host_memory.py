"""PrefixAware knows what engines keep in host memory of prompts that their GPUs have evicted."""

from collections.abc import Callable

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.router.registry import InstanceRegistry
from cleave.router.router import RequestPhase, Router
from cleave.rpc.v1 import agent_pb2

from tests.support.cached_prompts import add_queue, make_text, send, serve

TOKENS = 1_024
GPU_TOKENS, HOST_TOKENS = 4_000, 64_000
LOAD_MS = 0.02
"""Of one token, a fifth of what computing it takes before anything is learned."""
SPLIT = {"p1": "prefill", "p2": "prefill", "d1": "decode"}
MIXED = {"m1": "mixed", "m2": "mixed"}


@pytest.fixture
def tiered(make_event, clock) -> Callable[..., Router]:
    """A router over instances with host memory; `host`: its tokens by name, else HOST_TOKENS."""

    def make(roles: dict[str, str], host: dict[str, int] | None = None, **more: object) -> Router:
        registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
        for name, role in roles.items():
            event = make_event(
                *(name, role),
                kv_blocks_total=GPU_TOKENS // 16,
                host_kv_tokens=(host or {}).get(name, HOST_TOKENS),
                host_kv_token_ms=LOAD_MS,
                **more,
            )
            registry.on_event(name, event, 0.0)
        return Router(registry, clock=clock, seed=5)

    return make


def displace(router: Router, name: str, tokens: int = 5_120, seed: int = 1_000) -> None:
    """Let other prompts evict what the GPU of this instance has."""
    others = router.registry.instances.keys() - {name}
    prefills = {each for each in others if not each.startswith("d")}
    for number in range(tokens // TOKENS):
        serve(router, make_text(seed + number, TOKENS), excluded=prefills)


@pytest.mark.parametrize("roles", [SPLIT, MIXED])
def test_what_the_gpu_has_evicted_is_found_in_host_memory(tiered, roles) -> None:
    router, text = tiered(roles), make_text(1, TOKENS)
    home, _ = serve(router, text)
    displace(router, home)
    pick = send(router, text)
    assert (pick.prefill or pick.decode).instance == home
    assert round(pick._prefill_entry[2]) == 0
    assert round(pick.predicted_loaded) == TOKENS
    router = tiered(roles, dict.fromkeys(roles, 0))
    home, _ = serve(router, text)
    displace(router, home)
    assert send(router, text)._prefill_entry[2] == TOKENS, "without host memory"


def test_copying_back_counts_in_the_cost(tiered) -> None:
    router, text = tiered(SPLIT), make_text(1, TOKENS)
    home, _ = serve(router, text)
    displace(router, home)
    # 0.1 ms a token: computing takes 102 ms, copying back 20 ms.
    add_queue(router, home, 800)
    assert serve(router, text) == (home, 0)
    router = tiered(SPLIT)
    home, _ = serve(router, text)
    displace(router, home)
    add_queue(router, home, 850)
    assert serve(router, text)[0] != home


def test_a_gpu_that_has_the_prompt_is_preferred_to_host_memory(tiered) -> None:
    router, text = tiered(SPLIT), make_text(1, TOKENS)
    home, _ = serve(router, text)
    displace(router, home)
    other, _ = serve(router, text, excluded={home})
    add_queue(router, other, 190)
    assert serve(router, text)[0] == other
    add_queue(router, other, 20)
    assert serve(router, text)[0] == home


def test_only_the_end_of_a_prompt_is_copied_back_if_others_share_its_beginning(tiered) -> None:
    router = tiered({"p1": "prefill", "d1": "decode"})
    shared = make_text(1, 512)[:-1]
    text = shared + make_text(2, 512)
    serve(router, text)
    for number in range(5):
        serve(router, shared + make_text(10 + number, TOKENS))
    pick = send(router, text)
    # Half of the first block that is not shared is expected to be.
    assert pick.predicted_loaded == pytest.approx(512 - 128, abs=2)
    assert round(pick._prefill_entry[2]) == 0


def test_host_memory_ages_by_what_is_copied_there(tiered) -> None:
    router, text = tiered({"p1": "prefill", "d1": "decode"}, {"p1": 16_384}), make_text(1, TOKENS)
    serve(router, text)
    again = [make_text(100 + number, TOKENS) for number in range(6)]
    # Six prompts by turns: the GPU has room for less, and each is copied back, not stored again.
    for _ in range(6):
        for other in again:
            serve(router, other)
    in_flight = router.registry.instances["p1"].in_flight
    assert in_flight.written_tokens > 36_000
    assert round(send(router, text).predicted_loaded) == TOKENS
    displace(router, "p1", 60 * TOKENS)
    assert send(router, text).predicted_loaded == 0, "evicted there as well"


def test_the_time_of_a_prompt_that_is_copied_back_teaches_nothing(tiered, clock) -> None:
    router, text = tiered(MIXED), make_text(1, TOKENS)
    home, _ = serve(router, text)
    displace(router, home)
    queue = router.registry.instances[home].in_flight.queue
    before = queue.token_ms
    pick = send(router, text[:-1] + make_text(2, 200))
    assert pick.predicted_loaded > 0
    clock.now_s += 5.0
    router.release(pick, RequestPhase.PREFILL)
    assert queue.token_ms == before


def test_the_rate_that_an_engine_reports_replaces_the_assumed_one(tiered, loaded) -> None:
    router = tiered(MIXED)
    instance = router.registry.instances["m1"]
    assert instance.load_token_ms == LOAD_MS
    event = loaded("m1", host_kv_hits=100_000, host_kv_load_ms=500.0)
    router.registry.on_event("m1", event, 0.0)
    assert instance.load_token_ms == 0.005


def test_hits_in_host_memory_confirm_predictions(tiered, loaded, clock) -> None:
    router, text = tiered({"p1": "prefill", "d1": "decode"}), make_text(1, 4_096)
    others = [make_text(10 + number, 2_000) for number in range(2)]
    queries = found = 0
    for _ in range(60):
        for each in (text, *others):
            serve(router, each)
        clock.now_s += 1.0
        queries += 8_096
        found += 8_096
        report = loaded("p1", prefix_cache_queries=queries, prefix_cache_hits=0, host_kv_hits=found)
        router.registry.on_event("p1", report, clock.now_s)
    hits = router.registry.instances["p1"].hits
    assert hits.engine_share == 1.0
    assert hits.trust == 1.0


def test_nothing_is_pulled_that_is_in_host_memory(tiered) -> None:
    path = agent_pb2.KvPath(verified=True, token_ms=0.05)
    router, text = tiered(SPLIT, prefix_port=5_000, kv_path=path), make_text(1, TOKENS)
    home, _ = serve(router, text)
    displace(router, home)
    assert serve(router, text, excluded={home})[0] != home
    pick = send(router, text, excluded=set(SPLIT) - {home, "d1"})
    assert (pick.prefill.instance, pick.source) == (home, None)
    assert round(pick.predicted_loaded) == TOKENS
