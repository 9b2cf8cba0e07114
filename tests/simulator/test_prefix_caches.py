"""Prefix caches of simulated engines: against the reference simulator, against vLLM's own cache
manager block by block, and their rules one by one.

To look for more cases: pytest tests/simulator/test_prefix_caches.py --hypothesis-profile=long
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.simulator.fleet import (
    CacheView,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.prefix_caches import (
    find_cached_prefix,
    free_blocks,
    store_prompt,
    take_cached_prefix,
)
from cleave.simulator.record_access import get_instance, get_prompt, get_request
from cleave.simulator.records import NONE, State
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet, simulate
from cleave.simulator.trace import PromptBlocks, Trace
from cleave.simulator.validation import SimulationError

from tests.simulator.test_against_reference import INSTANCES, REQUESTS
from tests.support.fleets import draw_case, fixed_timing
from tests.support.reference_simulator import Reference

BLOCK = 4
FIND, ALLOCATE, FREE = range(3)


def build_trace(
    prompts: list[tuple[int, str]],
    gap_ms: float = 1_000.0,
    outputs: int = 2,
    block_tokens: int = BLOCK,
) -> Trace:
    """Prompts of so many tokens; each letter of the text is a block, equal after an equal text."""
    known: dict[str, int] = {}
    numbers, starts = [], [0]
    for _, text in prompts:
        parts = [text[: end + 1] for end in range(len(text))]
        numbers += [known.setdefault(part, len(known)) for part in parts]
        starts.append(len(numbers))
    blocks = PromptBlocks(block_tokens, np.array(starts), np.array(numbers), max(len(known), 1))
    tokens = np.array([tokens for tokens, _ in prompts])
    arrivals = gap_ms * np.arange(len(prompts))
    return Trace(arrivals, tokens, np.full(len(prompts), outputs), blocks=blocks)


def build_engine(tokens: int = 400, **more: Any) -> SimulatedEngine:
    """A prompt iteration takes 1 ms per token."""
    timing = replace(fixed_timing(), prompt_ms=(0.0, 1.0))
    return SimulatedEngine(timing, tokens, BLOCK, **more)


def serve(trace: Trace, engine: SimulatedEngine | None = None, count: int = 1) -> SimulationResult:
    return simulate(SimulatedFleet(mixed=(SimulatedPool(engine or build_engine(), count),)), trace)


def draw_blocks(draw: random.Random, trace: Trace) -> Trace:
    """Prompts that continue or repeat earlier ones, or begin alike."""
    texts: list[str] = []
    rows = []
    for tokens in trace.prompt_tokens.tolist():
        full = tokens // BLOCK
        text = draw.choice(["", *texts])[: draw.randint(0, full)] if texts else ""
        text += "".join(draw.choice("ab") for _ in range(full - len(text)))
        texts.append(text)
        rows.append((tokens, text))
    return replace(trace, blocks=build_trace(rows).blocks)


def draw_case_with_reuse(seed: int) -> tuple[SimulatedFleet, Trace]:
    """A random fleet of engines with equal blocks, and prompts that repeat."""
    fleet, trace = draw_case(seed)

    def change(pools: tuple[SimulatedPool, ...]) -> tuple[SimulatedPool, ...]:
        return tuple(
            replace(pool, engine=replace(pool.engine, kv_block_size=BLOCK)) for pool in pools
        )

    fleet = replace(
        fleet,
        prefill=change(fleet.prefill),
        decode=change(fleet.decode),
        mixed=change(fleet.mixed),
        cache_view=CacheView.NOTHING,
    )
    return fleet, draw_blocks(random.Random(f"blocks {seed}"), trace)


def compare(seed: int) -> int:
    """Compare with the reference; return the tokens found in caches."""
    fleet, trace = draw_case_with_reuse(seed)
    slow, fast = Reference(fleet, trace).run(), simulate(fleet, trace)
    fields = REQUESTS | {"cached": "cached_tokens", "pull_cached": "pull_cached_tokens"}
    for attribute, name in fields.items():
        expected = [float(getattr(request, attribute)) for request in slow.requests]
        message = f"case {seed}, {name}"
        actual = getattr(fast, name)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6, err_msg=message)
    for attribute, name in INSTANCES.items():
        # The reference counts the tokens of a shared block once for each request.
        if attribute not in ("area", "peak", "kv"):
            expected = [float(getattr(instance, attribute)) for instance in slow.instances]
            np.testing.assert_allclose(
                getattr(fast.instances, name), expected, atol=1e-6, err_msg=f"case {seed}, {name}"
            )
    served = fast.outcome == 0
    assert served.sum() < len(trace) or not fast.instances.kv_final_tokens.any()
    return int(fast.cached_tokens.sum() + fast.pull_cached_tokens.sum())


@pytest.mark.parametrize("group", range(4))
def test_hits_and_times_are_those_of_a_simulation_of_every_block(group: int) -> None:
    hits = [compare(seed) for seed in range(group * 250, group * 250 + 250)]
    assert np.count_nonzero(hits) > 50


@settings(derandomize=settings.get_current_profile_name() != "long")
@given(st.integers(2_000, 1 << 40))
def test_other_cases_agree_as_well(seed: int) -> None:
    compare(seed)


def test_blocks_that_are_all_different_change_nothing() -> None:
    compared = preemptions = 0
    for seed in range(300):
        fleet, trace = draw_case(seed)
        plain = simulate(fleet, trace)
        sizes = {
            pool.engine.kv_block_size for pool in (*fleet.prefill, *fleet.decode, *fleet.mixed)
        }
        counts = trace.prompt_tokens // max(sizes)
        starts = np.concatenate(([0], np.cumsum(counts)))
        numbers = np.arange(starts[-1])
        blocks = PromptBlocks(max(sizes), starts, numbers, max(len(numbers), 1))
        if any(max(sizes) % size for size in sizes):
            continue
        if plain.num_preemptions.any() and len(sizes) > 1:
            # A block of the trace that is longer than a KV block is found whole or not at all.
            continue
        unique = simulate(fleet, replace(trace, blocks=blocks))
        np.testing.assert_array_equal(unique.end_ms, plain.end_ms)
        np.testing.assert_array_equal(unique.instances.kv_token_ms, plain.instances.kv_token_ms)
        compared += 1
        preemptions += int(plain.num_preemptions.sum())
    assert compared > 100
    assert preemptions > 50


def test_a_hit_shortens_the_computation_and_never_covers_the_last_token() -> None:
    result = serve(build_trace([(20, "abcde"), (20, "abcde"), (24, "abcdef"), (20, "xbcde")]))
    assert result.cached_tokens.tolist() == [0, 16, 20, 0]
    assert result.ttft_ms.tolist() == [20.0, 4.0, 4.0, 20.0]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_preempted_request_computes_what_is_overwritten_and_its_last_token(
    is_counted: bool,
) -> None:
    # Room for 8 blocks. Each fills 4 when the first needs a fifth: so the second is preempted, with
    # 16 tokens of KV. Of its blocks the first one's answer takes the last when it is freed, and
    # another later. Then it resumes: it finds the first two and computes 9 of 17 tokens.
    trace = build_trace([(12, "abc"), (12, "xyz")], gap_ms=0.0, outputs=12)
    trace = replace(trace, blocks=None) if is_counted else trace
    found, off = (
        serve(trace, build_engine(8 * BLOCK, prefix_caching=caches)) for caches in (True, False)
    )
    assert found.num_preemptions.tolist() == off.num_preemptions.tolist() == [0, 1]
    assert found.instances.prompt_tokens.tolist() == [24 + 9]
    assert off.instances.prompt_tokens.tolist() == [24 + 17]


def test_a_block_is_found_by_requests_of_the_same_iteration() -> None:
    result = serve(build_trace([(20, "abcde"), (20, "abcde")], gap_ms=0.0))
    assert result.cached_tokens.tolist() == [0, 16]


def test_blocks_that_run_requests_share_are_held_once() -> None:
    # 25 blocks: five prompts of 20 blocks fit only because they share 19 of them.
    trace = build_trace([(80, "a" * 20)] * 5, gap_ms=0.0, outputs=3)
    result = serve(trace, build_engine(31 * BLOCK))
    assert result.num_preemptions.sum() == 0
    assert result.instances.batch_peak.tolist() == [5]
    assert result.instances.kv_final_tokens.tolist() == [0]


def test_the_least_recently_freed_block_is_evicted_first_and_a_prompts_end_before_its_start() -> (
    None
):
    # Room for 12 blocks. The second prompt and its answer's block take 6, the third 5 more.
    trace = build_trace([(20, "abcde"), (20, "ABCDE"), (20, "vwxyz"), (20, "abcde")], outputs=1)
    result = serve(trace, build_engine(12 * BLOCK))
    assert result.cached_tokens.tolist() == [0, 0, 0, 8]


def test_a_hit_on_the_decode_instance_shortens_the_pull() -> None:
    pool = (SimulatedPool(build_engine(), 1),)
    transfer = SimulatedTransfer(token_ms=1.0)
    trace = build_trace([(20, "abcde"), (40, "abcdefghij")])
    result = simulate(SimulatedFleet(pool, pool, transfer=transfer), trace)
    assert result.pull_cached_tokens.tolist() == [0, 20]
    assert (result.transfer_end_ms - result.transfer_start_ms).tolist() == [20.0, 20.0]


def test_a_long_block_of_the_trace_is_found_whole_or_not_at_all() -> None:
    result = serve(build_trace([(20, "ab"), (19, "a"), (24, "ac")], block_tokens=16))
    assert result.cached_tokens.tolist() == [0, 16, 16]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            PromptBlocks(6, np.array([0, 1]), np.array([0]), 1),
            "block_tokens of the trace is 6, no multiple of the kv_block_size 4 of an engine",
        ),
        (
            PromptBlocks(4, np.array([0, 1, 1]), np.array([0]), 1),
            "blocks.starts of the trace has 3 entries up to 1; it needs 2, from 0 to the 1 numbers",
        ),
        (
            PromptBlocks(4, np.array([0, 3]), np.array([0, 1, 2]), 3),
            "request 0 of the trace has 3 blocks of 4 tokens; its prompt of 8 tokens has 0 to 2",
        ),
        (
            PromptBlocks(4, np.array([0, 2]), np.array([0, 5]), 3),
            "blocks.numbers[1] of the trace is 5; it must be in 0..2",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(blocks: PromptBlocks, message: str) -> None:
    one = np.array([8])
    with pytest.raises(SimulationError) as error:
        serve(Trace(np.zeros(1), one, one, blocks=blocks))
    assert str(error.value).startswith(message)


# --- against vLLM's cache manager ---


def apply(state: State, kind: int, r: int, tokens: int) -> None:
    """One call of the cache of the only instance; compiled. FIND leaves the hit in `prompt.hit`;
    ALLOCATE takes that hit, and blocks up to `tokens`; FREE frees `tokens`."""
    request, prompt, inst = get_request(state, r), get_prompt(state, r), get_instance(state, 0)
    request.prefill = NONE
    if kind == FIND:
        prompt.hit = find_cached_prefix(state, 0, r)
    elif kind == ALLOCATE:
        if request.computed == 0:
            take_cached_prefix(state, 0, r, 0.0)
            request.computed = prompt.hit
        inst.free -= -(-tokens // inst.block) - -(-request.computed // inst.block)
        request.computed = tokens
        store_prompt(state, 0, r, tokens)
    else:
        free_blocks(state, 0, r, tokens, 0.0)


@pytest.fixture(scope="module")
def compiled() -> Callable[..., None]:
    return compile_loop(apply, int, int, int, has_blocks=True)


class VllmCache:
    """vLLM's KVCacheManager, without a model."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        # One block is vLLM's null block, which holds nothing.
        config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 1 << 20, BLOCK, BLOCK)

    def create_request(self, name: str, tokens: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=1_000, ignore_eos=True)
        return Request(name, tokens, params, None, block_hasher=self.hasher)

    @property
    def num_free(self) -> int:
        free: int = self.manager.block_pool.get_num_free_blocks()
        return free

    @property
    def num_cached(self) -> int:
        """Blocks that are cached and held by no request, with the copies of each content."""
        return sum(
            block.block_hash is not None and block.ref_cnt == 0
            for block in self.manager.block_pool.blocks
        )


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(30))
def test_hits_and_evictions_are_those_of_vllms_cache_manager(
    seed: int, compiled: Callable[..., None]
) -> None:
    pytest.importorskip("vllm")
    draw = random.Random(f"vllm {seed}")
    total = draw.choice([24, 40, 100])
    trace = draw_blocks(draw, build_trace([(draw.randint(1, 60), "") for _ in range(150)]))
    blocks = trace.blocks
    assert blocks is not None
    fleet = SimulatedFleet(mixed=(SimulatedPool(build_engine(total * BLOCK), 1),))
    arrays, state = lay_out(prepare_fleet(fleet), trace, 0)
    instance, cache, ours = arrays["instances"], arrays["caches"], arrays["prompts"]
    vllm = VllmCache(total)
    running: dict[int, Any] = {}
    requests: dict[int, Any] = {}
    hits = evictions = 0
    for r in range(len(trace)):
        while running and (len(running) > 3 or draw.random() < 0.5):
            ended = draw.choice(list(running))
            request = running.pop(ended)
            compiled(state, FREE, ended, request.num_computed_tokens)
            vllm.manager.free(request)
        numbers = blocks.numbers[blocks.starts[r] : blocks.starts[r + 1]].tolist()
        length = int(trace.prompt_tokens[r])
        # A block's content is its number; what fills no block is the request's own.
        tokens = [number for number in numbers for _ in range(BLOCK)]
        tokens += [1_000_000 + r] * (length - len(tokens))
        request = requests[r] = vllm.create_request(str(r), tokens)
        found, hit, _ = vllm.manager.get_computed_blocks(request)
        compiled(state, FIND, r, 0)
        assert ours["hit"][r] == hit, f"request {r}"
        hits += hit
        first = draw.randint(1, length - hit)
        if vllm.manager.allocate_slots(request, first, hit, found) is None:
            assert -(-(hit + first) // BLOCK) - ours["shared"][r] > instance["free"][0]
            continue
        assert -(-(hit + first) // BLOCK) - ours["shared"][r] <= instance["free"][0]
        compiled(state, ALLOCATE, r, hit + first)
        request.num_computed_tokens = hit + first
        running[r] = request
        left = length - hit - first
        if left and vllm.manager.allocate_slots(request, left) is not None:
            compiled(state, ALLOCATE, r, length)
            request.num_computed_tokens = length
        evictions += int(cache["evicted"][0]) > 0
        assert instance["free"][0] == vllm.num_free
        # Ours evicts later, before it looks up or frees.
        assert min(cache["size"][0], instance["free"][0]) == vllm.num_cached
        # What is left of any earlier prompt is the same as well.
        probed = draw.choice([each for each in requests if each not in running] or [r])
        compiled(state, FIND, probed, 0)
        if probed != r:
            assert ours["hit"][probed] == vllm.manager.get_computed_blocks(requests[probed])[1]
    assert hits > 0
    assert total > 40 or evictions > 0
