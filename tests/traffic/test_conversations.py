"""Generated conversations: lengths stay as stated, and prompts begin with the ones before."""

import numpy as np
import pytest

from cleave.api import workload as api
from cleave.simulator.trace import MAX_BLOCKS_PER_PROMPT, Trace
from cleave.traffic import workload
from cleave.traffic.conversations import Conversations
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, LogNormal

LENGTHS = IndependentLengths(
    LogNormal.from_mean_and_p90(2000, 4000), LogNormal.from_mean_and_p90(200, 400)
)
CHATS = Conversations(turns=5, interval_requests=60, new_tokens=256, shared_tokens=640)


def demand(conversations: Conversations = CHATS, rate: float = 10.0) -> Demand:
    return Demand(rate, GeneratedRequests(LENGTHS, conversations=conversations))


def test_lengths_are_those_that_are_declared() -> None:
    drawn = demand().draw(20_000)
    assert drawn.prompt_tokens.mean() == pytest.approx(2000, rel=0.03)
    assert drawn.output_tokens.mean() == pytest.approx(200, rel=0.03)
    assert np.quantile(drawn.prompt_tokens, 0.9) == pytest.approx(4000, rel=0.05)
    assert drawn.rate == pytest.approx(10, rel=0.03)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_model_len", [1000, 100_000])
def test_equal_blocks_have_equal_blocks_before_them(seed: int, max_model_len: int) -> None:
    blocks = demand().with_max_model_len(max_model_len).draw(2000, seed=seed).blocks
    before: dict[int, tuple[int, int]] = {}
    for start, end in zip(blocks.starts[:-1], blocks.starts[1:], strict=True):
        numbers = blocks.numbers[start:end].tolist()
        for at, number in enumerate(numbers):
            place = at, numbers[at - 1] if at else -1
            assert before.setdefault(number, place) == place
    assert blocks.numbers.max() < blocks.count


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_model_len", [1000, 100_000])
def test_each_prompt_ends_with_new_tokens(seed: int, max_model_len: int) -> None:
    drawn = demand().with_max_model_len(max_model_len).draw(2000, seed=seed)
    new = drawn.prompt_tokens - drawn.blocks.count_repeated() * drawn.blocks.block_tokens
    assert (new >= np.minimum(CHATS.new_tokens, drawn.prompt_tokens)).all()


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    short, long = demand().draw(700, seed=3), demand().draw(5000, seed=3)
    assert np.array_equal(short.prompt_tokens, long.prompt_tokens[:700])
    assert np.array_equal(short.blocks.starts, long.blocks.starts[:701])
    assert np.array_equal(short.blocks.numbers, long.blocks.numbers[: len(short.blocks.numbers)])


def test_longer_conversations_repeat_more_and_single_requests_only_what_all_share() -> None:
    shares = [
        drawn.bound_cached_tokens().sum() / drawn.prompt_tokens.sum()
        for turns in (1, 2, 10)
        for drawn in [demand(Conversations(turns, 60, 256)).draw(20_000)]
    ]
    assert shares[0] == 0
    assert 0.2 < shares[1] < shares[2] < 0.9
    common = demand(Conversations(1, 60, 256, 640)).draw(2000).blocks
    assert common.count_repeated().max() == 10
    assert common.block_tokens == 64


def test_the_next_turn_comes_after_the_interval_at_the_declared_rate_and_at_others() -> None:
    for rate in (10.0, 40.0):
        # A repetition lies as many requests back as arrive in 6 s on average; exponential.
        at_rate = demand(Conversations(8, 60, 256)).with_rate(rate)
        distance = at_rate.draw(20_000).blocks.compute_distance(0.5)
        assert distance == pytest.approx(6 * rate * np.log(2), rel=0.1)


def test_reuse_is_declared_in_the_workload_and_taken_over_to_observed_lengths(tmp_path) -> None:
    spec = api.Workload(
        rate=5.0,
        prompt_tokens=api.LengthDistribution(mean=700, p90=1400),
        output_tokens=api.LengthDistribution(mean=200),
        reuse=api.Reuse(turns=4, turn_interval_s=20, new_tokens=100),
    )
    declared = workload.build_from_spec(spec, tmp_path)
    assert declared.source.conversations == Conversations(4, 100.0, 100, 0)
    assert declared.has_reuse
    observed = workload.build_fixed(900, 100, 10.0)
    assert observed.with_reuse_of(declared).source.conversations == Conversations(4, 200.0, 100, 0)


def test_the_same_requests_can_be_drawn_as_if_no_prompt_repeated() -> None:
    with_reuse, without = demand().draw(500), demand().without_reuse().draw(500)
    assert np.array_equal(with_reuse.prompt_tokens, without.prompt_tokens)
    assert np.array_equal(with_reuse.arrival_ms, without.arrival_ms)
    assert without.blocks is None
    assert not demand().without_reuse().has_reuse


def test_a_trace_that_is_replayed_takes_no_declared_reuse() -> None:
    with pytest.raises(ValueError, match="state a rate too"):
        api.Workload(
            trace=api.TraceSource(path="t.jsonl"),
            reuse=api.Reuse(turns=4, turn_interval_s=20, new_tokens=100),
        )


def test_the_blocks_of_a_trace_are_taken_over_to_observed_lengths() -> None:
    recorded = workload.build_from_trace(demand().draw(4000))
    known = measure_share(recorded)
    same = Demand(10.0, GeneratedRequests(LENGTHS, 1.5)).with_reuse_of(recorded)
    drawn = same.draw(4000)
    assert same.source.burstiness == 1.5
    assert drawn.prompt_tokens.mean() == pytest.approx(2000, rel=0.05)
    assert drawn.output_tokens.mean() == pytest.approx(200, rel=0.05)
    assert measure_share(same) == pytest.approx(known, abs=0.02)
    shorter = Demand(10.0, workload.build_fixed(600, 50, 10.0).source).with_reuse_of(recorded)
    assert set(shorter.draw(4000).prompt_tokens) == {600}
    longer = Demand(10.0, workload.build_fixed(9000, 50, 10.0).source).with_reuse_of(recorded)
    assert 0 < measure_share(longer) < known / 2, "what is longer than recorded never repeats"
    assert recorded.with_reuse_of(recorded) is recorded


def measure_share(of: Demand) -> float:
    drawn = of.draw(4000)
    return float(drawn.bound_cached_tokens().sum() / drawn.prompt_tokens.sum())


@pytest.mark.parametrize("max_model_len", [None, 8192])
@pytest.mark.parametrize("new_tokens", [1, 16, 64, 3000])
def test_long_prompts_have_larger_blocks_and_few_of_them(
    new_tokens: int, max_model_len: int | None
) -> None:
    lengths = IndependentLengths(
        LogNormal.from_mean_and_p90(1_000_000, 2_000_000), LogNormal.from_mean_and_p90(200, 400)
    )
    chats = Conversations(20, 60, new_tokens, 4000)
    drawn = Demand(1.0, GeneratedRequests(lengths, conversations=chats), max_model_len).draw(2000)
    assert drawn.blocks.per_prompt <= 1.1 * MAX_BLOCKS_PER_PROMPT
    new = drawn.prompt_tokens - drawn.blocks.count_repeated() * drawn.blocks.block_tokens
    assert (new >= np.minimum(new_tokens, drawn.prompt_tokens)).all()
    assert drawn.blocks.count_repeated().max() > 0.1 * MAX_BLOCKS_PER_PROMPT


def test_a_trace_of_small_blocks_is_replayed_in_larger_ones() -> None:
    turns = CHATS.draw_turns(500, 0)
    prompts = np.rint(LENGTHS.draw(len(turns.owner), 0)[0]).astype(np.int64)
    prompts = prompts[turns.sort_by(prompts)]
    small = CHATS.build_blocks(turns, prompts, 1)
    recorded = Trace(np.arange(500.0), prompts[turns.order], np.ones(500, np.int64), blocks=small)
    large = workload.build_from_trace(recorded).source.trace.blocks
    assert small.per_prompt > 10 * MAX_BLOCKS_PER_PROMPT
    assert large.per_prompt <= MAX_BLOCKS_PER_PROMPT
    lost = small.count_repeated() - large.count_repeated() * large.block_tokens
    assert (lost >= 0).all()
    assert (lost < large.block_tokens).all()
    assert large.numbers.max() < large.count


@pytest.mark.parametrize("interval_requests", [0.0, 30_000.0, 86_400_000.0])
def test_turns_that_no_draw_reaches_are_not_drawn(interval_requests: float) -> None:
    turns = Conversations(10_000, interval_requests, new_tokens=256).draw_turns(2_000, seed=0)
    assert len(turns.order) == 2_000
    assert len(turns.owner) < 1_000_000
