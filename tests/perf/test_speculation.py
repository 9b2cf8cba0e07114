"""Mean times of tokens where drafts are accepted: hand-computed cases and limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.speculation import SpeculatingEstimator, Speculation, apply_speculation
from cleave.perf.timing import EngineTiming

TIMING = EngineTiming(
    prompt_step=100.0,
    prompt_ms=(5.0, 10.0, 20.0),
    prompt_square_ms=1e-6,
    decode_ms=(10.0, 10.5, 11.0, 12.0),
    decode_context_ms=(0.0, 0.001, 0.001, 0.002),
)
ONE = Speculation(tokens=1, acceptance_length=1.6, draft_share=0.1, context_share=0.25)


class OneSize:
    """Estimates instances of one GPU only."""

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        trust = Confidence(LatencySource.KERNELS, "kernels", 0.05)
        return Estimate(TIMING, 1000, 512, 4096, 100, 1.0, 1.0, 1.0, trust) if tensor == 1 else None

    def explain_unsupported(self, *_: object, expert: bool = False) -> str | None:
        return "too large"


def test_an_iteration_verifies_all_rows_and_drafts_before() -> None:
    found = apply_speculation(TIMING, ONE)
    # Two rows of one request take 11 ms, its draft a tenth of 10.5 ms.
    assert found.predict_decode_ms(1, 0) == pytest.approx((11.0 + 1.05) / 1.6)
    # Four rows lie beyond the table: 13 ms.
    assert found.predict_decode_ms(2, 0) == pytest.approx((13.0 + 1.1) / 1.6)
    context_ms = found.predict_decode_ms(2, 1000) - found.predict_decode_ms(2, 0)
    assert context_ms == pytest.approx(1000 * 0.001 * 1.25 / 1.6)


def test_several_rows_of_a_request_read_contexts_as_beside_a_prompt() -> None:
    found = apply_speculation(replace(TIMING, mixed_context_ms=(0.004,)), ONE)
    context_ms = found.predict_decode_ms(2, 1000) - found.predict_decode_ms(2, 0)
    assert context_ms == pytest.approx(1000 * 0.004 * 1.25 / 1.6)
    assert found.mixed_context_ms == ()


def test_prompts_take_as_long_as_before() -> None:
    found = apply_speculation(TIMING, ONE)
    assert found.predict_prefill_ms([150]) == TIMING.predict_prefill_ms([150])
    assert replace(found, decode_ms=(), decode_context_ms=()) == replace(
        TIMING, decode_ms=(), decode_context_ms=()
    )


@given(
    tokens=st.integers(1, 8),
    share=st.floats(0, 1),
    batch=st.integers(1, 500),
    draft=st.floats(0, 1),
)
def test_more_accepted_drafts_are_never_slower(
    tokens: int, share: float, batch: int, draft: float
) -> None:
    length = 1 + share * tokens
    found = apply_speculation(TIMING, Speculation(tokens, length, draft, draft))
    all_accepted = apply_speculation(TIMING, Speculation(tokens, tokens + 1, draft, draft))
    none_accepted = apply_speculation(TIMING, Speculation(tokens, 1, draft, draft))
    times = [each.predict_decode_ms(batch, 1000) for each in (all_accepted, found, none_accepted)]
    assert times == sorted(times)
    assert times[2] >= TIMING.predict_decode_ms(batch, 1000)


def test_drafts_pay_at_small_batches_and_not_where_rows_cost_as_much_as_weights() -> None:
    bound = replace(TIMING, decode_ms=tuple(max(10.0, row / 8) for row in range(513)))
    found = apply_speculation(bound, ONE)
    assert found.predict_decode_ms(8, 0) < bound.predict_decode_ms(8, 0)
    assert found.predict_decode_ms(256, 0) > bound.predict_decode_ms(256, 0)


def test_the_source_names_the_drafts_and_its_error_is_not_known() -> None:
    estimates = SpeculatingEstimator(OneSize(), ONE)
    found = estimates.estimate("A100", 1, 1)
    assert found is not None
    assert found.timing == apply_speculation(TIMING, ONE)
    assert found.confidence.source == "kernels; 1 drafted tokens, 1.6 emitted an iteration"
    assert (found.confidence.error, found.confidence.serving) == (None, None)
    assert estimates.estimate("A100", 2, 1) is None
    assert estimates.explain_unsupported("A100", 2, 1) == "too large"
