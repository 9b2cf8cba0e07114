"""What a router can know of the caches of the fleet's engines. Compiled.

Called by `dispatch`, and by `prefix_caches` where dispatch sees what engines cache. The blocks of
each prompt are recorded at the instances that it is sent to; a block is assumed to stay there until
as many tokens were written as the KV cache holds since it was last used. `cleave.router` does not
do so yet (decision 088). What is hard: common prefixes are known at all instances, so the
comparison of instances stops as soon as no other can cost less.
"""

import math

from cleave.policy.dispatch import Scores
from cleave.policy.prompt_cost import MAX_CANDIDATES
from cleave.simulator.record_access import (
    get_block,
    get_cache,
    get_candidate_numbers,
    get_candidate_slots,
    get_first_known,
    get_instance,
    get_known,
    get_prompt,
    get_request,
)
from cleave.simulator.records import NONE, SENT, State


def collect_candidates(state: State, r: int, scores: Scores, least: int) -> int:
    """Write the candidates of `prompt_cost.find_least_cost` for request `r`; return their number.

    The first is `least`, the open instance with the least score; then those that cache most.
    """
    prompt, first = get_prompt(state, r), get_instance(state, least)
    slots = get_candidate_slots(state, 0, MAX_CANDIDATES)
    cached = get_candidate_numbers(state, MAX_CANDIDATES, MAX_CANDIDATES)
    token_ms = get_candidate_numbers(state, 2 * MAX_CANDIDATES, MAX_CANDIDATES)
    slots[0], cached[0], token_ms[0] = least, 0.0, first.upper_token_ms
    state.num_searches += 1
    count = 1
    for depth in range(_find_depth(state, r), 0, -1):
        tokens = min(depth * state.block_tokens, get_request(state, r).prompt)
        k = get_first_known(state, get_block(state, prompt.first_block + depth - 1).value).value
        while k != NONE:
            known = get_known(state, k)
            cache = get_cache(state, known.instance)
            if known.instance == least:
                cached[0] = tokens
            elif cache.search != state.num_searches and count < MAX_CANDIDATES:
                cache.search = state.num_searches
                if scores[known.instance] < math.inf:
                    slots[count], cached[count] = known.instance, tokens
                    token_ms[count] = get_instance(state, known.instance).upper_token_ms
                    count += 1
            k = known.next
        if cached[0] > 0.0 or count == MAX_CANDIDATES:
            break
    return count


def count_known_tokens(state: State, i: int, r: int) -> int:
    """Tokens of the prompt of request `r` that instance `i` is known to cache."""
    prompt = get_prompt(state, r)
    low, high = 0, prompt.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        block = get_block(state, prompt.first_block + middle - 1).value
        if _find_known(state, i, block) != NONE:
            low = middle
        else:
            high = middle - 1
    return min(low * state.block_tokens, get_request(state, r).prompt)


def record_prompt(state: State, i: int, r: int, written: float) -> None:
    """Request `r` was sent to instance `i`, which will write `written` tokens of KV for it."""
    prompt, inst, cache = get_prompt(state, r), get_instance(state, i), get_cache(state, i)
    full = min(prompt.num_blocks, get_request(state, r).prompt // state.block_tokens)
    # Engines evict the end of a prompt first.
    for at in range(full - 1, -1, -1):
        record_block(state, i, get_block(state, prompt.first_block + at).value)
    cache.written += written
    while state.cache_view == SENT and cache.first_used != NONE:
        known = get_known(state, cache.first_used)
        if cache.written - known.written <= inst.blocks * inst.block:
            break
        forget_block(state, i, known.block)


def record_block(state: State, i: int, block: int) -> None:
    """Instance `i` caches the block, or uses it again."""
    cache = get_cache(state, i)
    k = _find_known(state, i, block)
    if k == NONE:
        k = _create_known(state)
        known = get_known(state, k)
        known.block = block
        known.instance = i
        known.next = get_first_known(state, block).value
        get_first_known(state, block).value = k
    else:
        _drop_link(state, i, k)
    known = get_known(state, k)
    known.written = cache.written
    known.younger = NONE
    known.older = cache.last_used
    if cache.last_used == NONE:
        cache.first_used = k
    else:
        get_known(state, cache.last_used).younger = k
    cache.last_used = k


def forget_block(state: State, i: int, block: int) -> None:
    """Instance `i` does not cache the block any more."""
    k = _find_known(state, i, block)
    if k == NONE:
        return
    _drop_link(state, i, k)
    known = get_known(state, k)
    before = get_first_known(state, block).value
    if before == k:
        get_first_known(state, block).value = known.next
    else:
        while get_known(state, before).next != k:
            before = get_known(state, before).next
        get_known(state, before).next = known.next
    known.next = state.free_known
    state.free_known = k


def _find_depth(state: State, r: int) -> int:
    """Number of leading blocks of a prompt that any instance is known to cache."""
    prompt = get_prompt(state, r)
    # Where a block is known, all blocks before it are: later ones are forgotten first.
    low, high = 0, prompt.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        block = get_block(state, prompt.first_block + middle - 1).value
        if get_first_known(state, block).value != NONE:
            low = middle
        else:
            high = middle - 1
    return low


def _find_known(state: State, i: int, block: int) -> int:
    k = get_first_known(state, block).value
    while k != NONE and get_known(state, k).instance != i:
        k = get_known(state, k).next
    return k


def _create_known(state: State) -> int:
    k = state.free_known
    if k == NONE:
        k = state.num_known
        state.num_known += 1
    else:
        state.free_known = get_known(state, k).next
    return k


def _drop_link(state: State, i: int, k: int) -> None:
    """Remove a known block from the instance's list by use."""
    cache, known = get_cache(state, i), get_known(state, k)
    if known.older == NONE:
        cache.first_used = known.younger
    else:
        get_known(state, known.older).younger = known.younger
    if known.younger == NONE:
        cache.last_used = known.older
    else:
        get_known(state, known.younger).older = known.older
