"""Prompts whose beginning is pulled from another simulated instance's prefix cache."""

from dataclasses import replace

import numpy as np
import pytest

from cleave.simulator.fleet import (
    Batching,
    CacheView,
    DispatchPolicy,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.run import simulate
from cleave.simulator.trace import AnswerBlocks, PromptBlocks, Trace
from cleave.simulator.validation import SimulationError

from tests.simulator.test_prefix_caches import BLOCK, build_engine, build_trace

FAST = SimulatedTransfer(latency_ms=0.5, token_ms=0.01)
LONG = "abcdefghij" * 3


def teach(count: int) -> list[tuple[int, str]]:
    """Prompts of various lengths, from which dispatch learns how fast instances are."""
    sizes = [10 * (1 + each % 5) for each in range(count)]
    return [(BLOCK * size, chr(0x100 + each) * size) for each, size in enumerate(sizes)]


FIRST = 6
TEACHING = teach(FIRST)


def serve(
    trace: Trace,
    transfer: SimulatedTransfer = FAST,
    prefills: int = 2,
    tokens: int = 4_000,
    decode_tokens: int = 4_000,
    pulls: bool = True,
    **more: object,
) -> SimulationResult:
    """Requests on prefill instances and one decode instance."""
    fleet = SimulatedFleet(
        (SimulatedPool(build_engine(tokens), prefills),),
        (SimulatedPool(build_engine(decode_tokens), 1),),
        transfer=transfer,
        dispatch=DispatchPolicy.PREFIX_AWARE,
        pulls_prefixes=pulls,
    )
    return simulate(replace(fleet, **more), trace)  # type: ignore[arg-type]


def build_busy_source() -> Trace:
    """LONG, then a prompt that keeps its instance busy for 300 ms, and LONG again 5 ms later."""
    trace = build_trace([*TEACHING, (120, LONG), (420, LONG + "z" * 75), (121, LONG)])
    arrival_ms = trace.arrival_ms.copy()
    arrival_ms[-1] = arrival_ms[-2] + 5.0
    return replace(trace, arrival_ms=arrival_ms)


def test_a_prefix_is_pulled_where_its_instance_has_a_queue() -> None:
    pulled, computed = serve(build_busy_source()), serve(build_busy_source(), pulls=False)
    assert pulled.fetched_tokens.tolist() == [0] * (FIRST + 2) + [120]
    assert pulled.prefill_instance[-1] != pulled.prefill_instance[FIRST]
    assert pulled.source_instance[-1] in (pulled.prefill_instance[FIRST], 2)
    assert computed.ttft_ms[-1] > 100.0
    assert pulled.ttft_ms[-1] < 10.0
    assert (
        pulled.instances.prompt_tokens[:2].sum() == computed.instances.prompt_tokens[:2].sum() - 120
    )
    assert pulled.instances.kv_final_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "transfer",
    [SimulatedTransfer(token_ms=5.0), SimulatedTransfer(latency_ms=500.0)],
    ids=["slow link", "latency"],
)
def test_nothing_is_pulled_where_computing_is_faster(transfer: SimulatedTransfer) -> None:
    assert not serve(build_busy_source(), transfer).fetched_tokens.any()


def test_what_the_source_has_evicted_meanwhile_is_computed() -> None:
    # The decode instance has room for two prompts, which others fill after the one to be repeated.
    prompts = [*TEACHING, (120, LONG), *[(120, letter * 30) for letter in "uvwxyz"], (121, LONG)]
    trace = build_trace(prompts)
    # What is known is not what is there: the router believes that more fits.
    result = serve(trace, prefills=1, tokens=260, decode_tokens=260, cache_view=CacheView.SENT)
    assert (result.outcome == 0).all()
    assert result.cached_tokens[-1] + result.fetched_tokens[-1] == 0


def build_turns(answer: bool) -> Trace:
    """A prompt of 120 tokens, and one that continues its answer of 40."""
    trace = build_trace([*TEACHING, (120, LONG), (200, LONG + "ABCDEFGHIJ" + "z" * 10)], 5_000.0)
    output = trace.output_tokens.copy()
    output[6] = 41
    blocks = trace.blocks
    assert blocks is not None
    own = blocks.numbers[blocks.starts[7] : blocks.starts[8]][30:40] if answer else []
    counts = [0] * FIRST + [len(own), 0]
    starts = np.concatenate(([0], np.cumsum(counts)))
    answers = AnswerBlocks(starts, np.array(own, np.int64))
    return replace(trace, output_tokens=output, blocks=replace(blocks, answers=answers))


def test_the_next_turn_pulls_the_answer_from_the_decode_instance() -> None:
    result = serve(build_turns(answer=True), prefills=1)
    assert result.cached_tokens[7] == 120
    assert result.fetched_tokens[7] == 40
    plain = serve(build_turns(answer=False), prefills=1)
    assert (plain.cached_tokens[7], plain.fetched_tokens[7]) == (120, 0)
    assert result.ttft_ms[7] < plain.ttft_ms[7]


def test_a_mixed_instance_finds_the_answer_in_its_own_cache() -> None:
    fleet = SimulatedFleet(mixed=(SimulatedPool(build_engine(), 1),))
    assert simulate(fleet, build_turns(answer=True)).cached_tokens[7] == 160


def test_what_was_evicted_unnoticed_is_pulled_instead_of_computed() -> None:
    # Dispatch believes that the prefill instance, where prompts share blocks, has all of them.
    texts = [LONG, *[letter * 30 for letter in "uvw"], LONG]
    trace = build_trace([*TEACHING, *[(121, text) for text in texts]], outputs=2)
    full = serve(trace, prefills=1, tokens=420)
    assert full.cached_tokens[-1] + full.fetched_tokens[-1] == 120


def test_links_serve_one_prefix_after_another() -> None:
    # The prefill instance has room for three prompts, the decode instance has all.
    texts = [letter * 30 for letter in "uvwxyz"]
    prompts = [*TEACHING, *[(120, text) for text in texts], (121, texts[0]), (122, texts[1])]
    trace = build_trace(prompts)
    arrival_ms = np.minimum(trace.arrival_ms, trace.arrival_ms[-2])
    result = serve(
        replace(trace, arrival_ms=arrival_ms),
        SimulatedTransfer(token_ms=0.2),
        prefills=1,
        tokens=400,
    )
    assert result.fetched_tokens[-2:].tolist() == [120, 120]
    assert result.source_instance[-2:].tolist() == [1, 1]
    assert (result.prefill_start_ms - result.arrival_ms)[-2:] == pytest.approx([24.0, 48.0])


@pytest.mark.parametrize("seed", range(20))
def test_all_blocks_are_free_after_any_traffic(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prompts = []
    for _ in range(150):
        text = LONG[: draw.integers(1, 30)] + "".join(draw.choice(list("xyz"), draw.integers(0, 9)))
        prompts.append((len(text) * BLOCK + int(draw.integers(0, BLOCK)), text))
    trace = build_trace(prompts, gap_ms=float(draw.choice([2.0, 10.0, 40.0])), outputs=5)
    result = serve(
        trace,
        prefills=int(draw.integers(1, 5)),
        tokens=int(draw.integers(60, 200)) * BLOCK,
        decode_tokens=int(draw.integers(60, 200)) * BLOCK,
    )
    assert (result.outcome == 0).all()
    assert not result.instances.kv_final_tokens.any()
    total = result.cached_tokens + result.fetched_tokens
    assert (total < result.prompt_tokens).all()
    assert (total % BLOCK == 0).all()


def test_other_batching_is_refused() -> None:
    engine = replace(build_engine(), batching=Batching.PREFILL_FIRST)
    pool = (SimulatedPool(engine, 1),)
    with pytest.raises(SimulationError, match="pulls_prefixes needs batching VLLM"):
        simulate(SimulatedFleet(pool, pool, pulls_prefixes=True), build_trace([(20, "abcde")]))


@pytest.mark.parametrize(
    ("numbers", "prompt", "message"),
    [
        ([9], [0, 1], "blocks.answers.numbers[0] of the trace is 9; it must be in 0..3"),
        ([3], [0], "request 0 of the trace has an answer with blocks, and 1 blocks of its prompt"),
    ],
)
def test_answers_that_cannot_be_are_refused(
    numbers: list[int], prompt: list[int], message: str
) -> None:
    answers = AnswerBlocks(np.array([0, 1]), np.array(numbers))
    blocks = PromptBlocks(4, np.array([0, len(prompt)]), np.array(prompt), 4, answers)
    trace = Trace(np.zeros(1), np.array([8]), np.array([6]), blocks=blocks)
    with pytest.raises(SimulationError) as error:
        serve(trace)
    assert str(error.value).startswith(message)


def test_answers_move_with_their_requests() -> None:
    blocks = build_turns(answer=True).blocks
    assert blocks is not None
    selected = blocks.select(np.array([6, 7, 6, 7]), np.array([0, 0, 1, 1]))
    answers = selected.answers
    assert answers is not None
    assert answers.starts.tolist() == [0, 10, 10, 20, 20]
    for at, following in ((0, 1), (2, 3)):
        own = answers.numbers[answers.starts[at] : answers.starts[at + 1]]
        begin = selected.starts[following] + 30
        assert own.tolist() == selected.numbers[begin : begin + 10].tolist()
