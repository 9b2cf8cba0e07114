"""Up to which prompt length a decode instance had better compute the prompt itself.

Called by the planner, which knows how long passes and transfers take; the router gets the result
as a number. What is hard: a prompt computed beside decoding requests makes their next pass longer,
so the length is bounded by their TPOT target, not by the waiting of the request alone.
"""

from cleave.perf.timing import Chunk, Timing

_MOST_TOKENS = 1 << 15


def find_whole_below_tokens(
    prefill: Timing,
    decode: Timing,
    transfer_ms: float,
    transfer_token_ms: float,
    batch: int,
    context_tokens: int,
    tpot_ms: float,
) -> int:
    """The longest prompt (less what is cached) for which a split is no gain; 0: always split.

    `batch`, `context_tokens`: what a decode instance usually runs, contexts summed. Two things must
    hold: the first token comes no later than by a prefill instance that waits idle, a transfer of
    `transfer_ms` and `transfer_token_ms` per token, and a decode pass; and the pass that the prompt
    shares keeps to `tpot_ms`. Both get harder with length, which is why a bisection finds it.
    """
    decode_ms = decode.decode_pass_ms(batch + 1, context_tokens)

    def is_whole(tokens: int) -> bool:
        shared_ms = decode.iteration_ms([Chunk(0, tokens)], batch, context_tokens)
        moved_ms = transfer_ms + transfer_token_ms * tokens
        split_ms = prefill.prefill_ms([tokens]) + moved_ms + decode_ms
        return shared_ms <= min(split_ms, tpot_ms)

    low, high = 0, _MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if is_whole(middle):
            low = middle
        else:
            high = middle - 1
    return low
