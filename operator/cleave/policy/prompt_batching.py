"""How many prompt tokens an iteration computes. Called by the simulator and the emulated engine.

Plain arithmetic, the subset that numba compiles; standard library only.
"""


def compute_chunk_size(remaining_tokens: int, budget: int) -> int:
    """Tokens of the next chunk of a prompt with `remaining_tokens` tokens to compute.

    `budget`: tokens left in the iteration (Sarathi-Serve; vLLM's max_num_batched_tokens;
    TetriInfer's ChunkSize, section 3.3.3).
    """
    return min(remaining_tokens, budget)


def may_join_prompts(tokens: int, prompt_tokens: int, saturation_tokens: int) -> bool:
    """Whether an unchunked prompt may join an iteration with `tokens` of other prompts.

    Prompts are batched up to L_m tokens, beyond which throughput no longer grows; a longer prompt
    runs alone (DistServe, section 4.3).
    """
    return tokens == 0 or tokens + prompt_tokens <= saturation_tokens
