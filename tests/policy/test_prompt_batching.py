"""How much of which prompts a pass takes."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.prompt_batching import compute_chunk_size, may_join_prompts

tokens = st.integers(1, 10_000)


def test_a_prompt_is_cut_to_what_the_pass_has_room_for() -> None:
    assert compute_chunk_size(remaining_tokens=700, budget=512) == 512
    assert compute_chunk_size(remaining_tokens=188, budget=512) == 188


@given(tokens, tokens)
def test_chunks_add_up_to_the_prompt(prompt: int, budget: int) -> None:
    left, passes = prompt, 0
    while left:
        left -= compute_chunk_size(left, budget)
        passes += 1
    assert passes == -(-prompt // budget)


def test_prompts_are_joined_up_to_saturation_and_a_longer_one_runs_alone() -> None:
    assert may_join_prompts(300, 212, saturation_tokens=512)
    assert not may_join_prompts(300, 213, saturation_tokens=512)
    assert may_join_prompts(0, 9_000, saturation_tokens=512)
