"""The prompt length up to which a decode instance should compute the prompt itself.

Called by the planner, which knows the times of iterations and transfers; the router gets the result
as a number. What is hard: a prompt computed beside decoding requests lengthens their next
iteration, so the length is bounded by their TPOT target, too.
"""

from cleave.perf.timing import EngineTiming, PromptChunk

_MAX_TOKENS = 1 << 15


def find_short_prompt_tokens(
    prefill: EngineTiming,
    decode: EngineTiming,
    transfer_ms: float,
    transfer_token_ms: float,
    batch: int,
    context_tokens: int,
    tpot_ms: float,
) -> int:
    """The longest prompt (without cached tokens) for which disaggregation gains nothing; 0: none.

    `batch`, `context_tokens`: usual batch of a decode instance and the sum of its contexts. For
    such a prompt 1. the first token comes no later than with an idle prefill instance, a transfer
    of `transfer_ms` and `transfer_token_ms` per token, and a decode iteration; and 2. the iteration
    that contains the prompt takes at most `tpot_ms`. Both conditions are monotonic in the length,
    so bisection finds it.
    """
    decode_ms = decode.predict_decode_ms(batch + 1, context_tokens)

    def is_short(tokens: int) -> bool:
        shared_ms = decode.predict_iteration_ms([PromptChunk(0, tokens)], batch, context_tokens)
        moved_ms = transfer_ms + transfer_token_ms * tokens
        disaggregated_ms = prefill.predict_prefill_ms([tokens]) + moved_ms + decode_ms
        return shared_ms <= min(disaggregated_ms, tpot_ms)

    low, high = 0, _MAX_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if is_short(middle):
            low = middle
        else:
            high = middle - 1
    return low
