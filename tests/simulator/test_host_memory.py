"""Copies of KV in the host memory of simulated engines, and dispatch that knows of them."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cleave.simulator.fleet import Batching, CacheView, SimulatedFleet, SimulatedPool
from cleave.simulator.host_memory import find_loadable, retire_blocks
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.prefix_caches import find_cached_prefix, store_prompt, take_cached_prefix
from cleave.simulator.record_access import get_instance, get_prompt, get_request
from cleave.simulator.records import NONE, State
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet, simulate
from cleave.simulator.trace import Trace
from cleave.simulator.validation import SimulationError

from tests.simulator.test_prefix_caches import BLOCK, build_engine, build_trace, draw_blocks, serve
from tests.simulator.test_prefix_pulls import FIRST, TEACHING

LOAD_MS = 0.1
"""Of one token; computing one takes 1 ms."""


def build_tiers(tokens: int = 48, host_tokens: int = 400, **more: Any):
    """An engine with room for two prompts of 20 tokens and their answers on its GPU."""
    return build_engine(
        tokens, host_capacity_tokens=host_tokens, host_token_ms=more.pop("load_ms", LOAD_MS), **more
    )


def turn(*texts: str) -> Trace:
    return build_trace([(4 * len(text), text) for text in texts], outputs=1)


def test_what_the_gpu_has_evicted_is_copied_back_instead_of_computed() -> None:
    trace = turn("abcde", "ABCDE", "vwxyz", "abcde")
    plain, tiers = serve(trace, build_engine(48)), serve(trace, build_tiers())
    assert plain.cached_tokens.tolist() == [0, 0, 0, 8]
    assert tiers.cached_tokens.tolist() == [0, 0, 0, 8]
    assert tiers.loaded_tokens.tolist() == [0, 0, 0, 8]
    # 8 tokens take 0.8 ms, the last four 4 ms.
    assert tiers.ttft_ms[-1] == pytest.approx(4.8)
    assert tiers.cached_share == 16 / 80
    assert tiers.instances.kv_final_tokens.tolist() == [0]
    assert not serve(trace, build_tiers(host_tokens=0)).loaded_tokens.any()


def test_copies_follow_those_on_the_gpu_and_end_at_the_first_that_is_missing() -> None:
    # Host memory has room for seven blocks: of the first prompt its last two are evicted.
    trace = turn("abcde", "ABCD", "vwxyz", "zzzzz", "abcdef")
    result = serve(trace, build_tiers(48, 14 * BLOCK))
    assert (result.cached_tokens[-1], result.loaded_tokens[-1]) == (0, 0)
    result = serve(trace, build_tiers(48, 17 * BLOCK))
    assert (result.cached_tokens[-1], result.loaded_tokens[-1]) == (0, 12)


def test_what_was_used_last_stays_in_host_memory_also_if_the_gpu_had_it() -> None:
    texts = ["abcde", "ABCDE", "abcdef", "vwxyz", "zzzzz", "yyyyy"]
    result = serve(turn(*texts, "abcde"), build_tiers(64, 16 * BLOCK))
    assert result.cached_tokens[2] == 20
    assert result.cached_tokens[-1] + result.loaded_tokens[-1] == 4, "its first block"
    result = serve(turn(*texts, "abcde"), build_tiers(64, 21 * BLOCK))
    assert result.cached_tokens[-1] + result.loaded_tokens[-1] == 16
    result = serve(turn(*texts, "ABCDE"), build_tiers(64, 21 * BLOCK))
    assert result.cached_tokens[-1] + result.loaded_tokens[-1] == 0, "used before"


def test_prompts_are_computed_while_another_one_is_copied_back() -> None:
    trace = turn("abcde", "ABCDE", "vwxyz", "abcde", "z")
    arrival_ms = trace.arrival_ms.copy()
    arrival_ms[-1] = arrival_ms[-2]
    result = serve(replace(trace, arrival_ms=arrival_ms), build_tiers(load_ms=1.0))
    assert result.loaded_tokens[3] == 8
    assert result.ttft_ms.tolist()[3:] == [12.0, 4.0]


def test_one_copy_after_another_goes_over_the_link() -> None:
    trace = turn("abcde", "ABCDE", "vwxyz", "VWXYZ", "abcde", "ABCDE")
    arrival_ms = np.minimum(trace.arrival_ms, trace.arrival_ms[4])
    result = serve(replace(trace, arrival_ms=arrival_ms), build_tiers(60, load_ms=1.0))
    assert result.loaded_tokens[4:].tolist() == [16, 16]
    assert (result.prefill_start_ms - result.arrival_ms)[4:].tolist() == [16.0, 32.0]


def test_prefill_instances_copy_back_as_well() -> None:
    fleet = SimulatedFleet(
        (SimulatedPool(build_tiers(40), 1),), (SimulatedPool(build_tiers(400), 1),)
    )
    result = simulate(fleet, turn("abcde", "ABCDE", "vwxyz", "abcdefgh"))
    assert result.cached_tokens[-1] + result.loaded_tokens[-1] == 20
    assert result.loaded_tokens[-1] > 0
    assert (result.outcome == 0).all()
    assert result.instances.kv_final_tokens.tolist() == [0, 0]


def converse(num: int, turns: int, seed: int = 3) -> Trace:
    """`num` conversations side by side, each turn of which continues the one before."""
    draw = random.Random(seed)
    texts = [chr(0x1000 + each) * draw.randint(20, 40) for each in range(num)]
    prompts = [*TEACHING]
    for number in range(turns):
        for at in draw.sample(range(num), num):
            texts[at] += chr(0x2000 + number) * draw.randint(2, 6)
            prompts.append((BLOCK * len(texts[at]) + 1, texts[at]))
    trace = build_trace(prompts, outputs=4)
    arrival_ms = np.concatenate(
        (trace.arrival_ms[:FIRST], trace.arrival_ms[FIRST] + 40.0 * np.arange(num * turns))
    )
    return replace(trace, arrival_ms=arrival_ms)


def serve_conversations(trace: Trace, is_known: bool = True) -> SimulationResult:
    """Three mixed instances whose GPUs hold a fifth of the conversations. `is_known`: whether
    dispatch knows of host memory."""
    fleet = SimulatedFleet(mixed=(SimulatedPool(build_tiers(1_000, 20_000), 3),))
    prepared = prepare_fleet(fleet)
    if not is_known:
        prepared.instances["host_tokens"] = 0
    return simulate(prepared, trace)


def test_conversations_go_where_host_memory_has_them() -> None:
    trace = converse(60, 8)
    known, unknown = serve_conversations(trace), serve_conversations(trace, is_known=False)
    most = trace.bound_cached_tokens().sum()
    assert known.cached_share > 0.9 * most / trace.prompt_tokens.sum()
    assert unknown.cached_share < 0.75 * most / trace.prompt_tokens.sum()
    assert np.nanmean(known.ttft_ms) < 0.6 * np.nanmean(unknown.ttft_ms)
    assert (known.outcome == 0).all()


@pytest.mark.parametrize("seed", range(10))
def test_any_fleet_ends_all_requests_and_computes_each_token_once(seed: int) -> None:
    draw = random.Random(seed)
    trace = converse(draw.randint(5, 40), draw.randint(2, 6), seed)
    pool = (SimulatedPool(build_tiers(800, draw.choice([400, 4_000])), draw.randint(1, 3)),)
    fleet = SimulatedFleet(*draw.choice([(pool, pool), ((), (), pool)]))
    result = simulate(fleet, trace)
    assert (result.outcome == 0).all()
    assert not result.instances.kv_final_tokens.any()
    if not result.num_preemptions.any():
        found = result.cached_tokens + result.loaded_tokens
        assert (found < trace.prompt_tokens).all()
        assert result.instances.prompt_tokens.sum() == (trace.prompt_tokens - found).sum()


def test_host_memory_that_cannot_be_simulated_is_refused() -> None:
    trace = turn("ab")
    message = "host_capacity_tokens is 400 with batching ORCA; set 0, or batching VLLM"
    with pytest.raises(SimulationError, match=message):
        serve(trace, build_tiers(batching=Batching.ORCA))
    with pytest.raises(SimulationError, match=r"host_token_ms is -1\.0; it must be finite"):
        serve(trace, build_tiers(load_ms=-1.0))
    fleet = SimulatedFleet(mixed=(SimulatedPool(build_tiers(), 1),), cache_view=CacheView.CACHED)
    with pytest.raises(SimulationError, match="cache_view CACHED does not see host memory"):
        simulate(fleet, trace)


# --- against vLLM's manager of host memory ---


def end_prompt(state: State, r: int) -> None:
    """Request `r` is computed and ends on the only instance; `prompt.loaded` is what host memory
    had of it. Compiled."""
    request, prompt, inst = get_request(state, r), get_prompt(state, r), get_instance(state, 0)
    request.prefill = NONE
    prompt.hit = find_cached_prefix(state, 0, r)
    prompt.loaded = find_loadable(state, 0, r, prompt.hit)
    take_cached_prefix(state, 0, r, 0.0)
    inst.free -= -(-request.prompt // inst.block) - prompt.hit // inst.block
    store_prompt(state, 0, r, request.prompt)
    retire_blocks(state, 0, r, request.prompt, 0.0)


@pytest.fixture(scope="module")
def compiled() -> Callable[..., None]:
    return compile_loop(end_prompt, int, has_blocks=True)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_copies_and_evictions_are_those_of_vllms_manager(
    seed: int, compiled: Callable[..., None]
) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    draw = random.Random(f"host {seed}")
    total, on_gpu = draw.choice([70, 150, 400]), 64
    trace = draw_blocks(draw, build_trace([(draw.randint(1, 200), "") for _ in range(150)]))
    blocks = trace.blocks
    assert blocks is not None
    fleet = SimulatedFleet(mixed=(SimulatedPool(build_tiers(on_gpu * BLOCK, total * BLOCK), 1),))
    arrays, state = lay_out(prepare_fleet(fleet), trace, 0)
    ours, cache = arrays["prompts"], arrays["caches"]
    manager = CPUOffloadingManager(total)
    loaded = 0
    for r in range(len(trace)):
        compiled(state, r)
        numbers = blocks.numbers[blocks.starts[r] : blocks.starts[r + 1]].tolist()
        keys = [make_offload_key(number.to_bytes(8), 0) for number in numbers]
        context = ReqContext(req_id=str(r))
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place)
        manager.on_new_request(context)
        limit = (int(trace.prompt_tokens[r]) - 1) // BLOCK
        first = found = int(ours["hit"][r]) // BLOCK
        while found < limit and manager.lookup(keys[found], context) is LookupResult.HIT:
            found += 1
        assert ours["loaded"][r] == (found - first) * BLOCK, f"request {r}"
        loaded += found - first
        # Blocks on the GPU are offered as well, so that they count as used.
        output = manager.prepare_store(keys, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        assert cache["size"][1] == len(manager._policy.chunks)
    assert loaded > 0
