"""How many prompt tokens a pass takes. Called by the simulator and by the emulated engine.

Plain arithmetic, the subset that numba compiles; standard library only.
"""


def cut_chunk(left: int, budget: int) -> int:
    """Tokens of a prompt with `left` tokens to compute that the pass takes.

    `budget`: tokens that the pass has room for (Sarathi-Serve; vLLM's max_num_batched_tokens;
    TetriInfer's ChunkSize, section 3.3.3).
    """
    return min(left, budget)


def joins_prompts(tokens: int, prompt_tokens: int, saturation_tokens: int) -> bool:
    """Whether a whole prompt joins a pass that holds `tokens` of other prompts already.

    Prompts are joined while their sum stays within L_m, from where on the pass only grows longer;
    a prompt beyond L_m runs alone (DistServe, section 4.3).
    """
    return tokens == 0 or tokens + prompt_tokens <= saturation_tokens
