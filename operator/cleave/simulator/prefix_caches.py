"""The prefix caches of simulated engines, by block, with vLLM's rules. Compiled.

Called by the modules that admit, compute and free requests; used only if the trace says which
prompts begin alike, but for rule 4. The rules (vLLM v1: `block_pool`, `kv_cache_manager`):
1. A full block of a computed prompt is cached from the iteration that computes it, and shared by
   reference count. A request finds the longest cached prefix, never its last token.
2. The blocks of a request are freed from its end to its beginning. Freed blocks stay cached, least
   recently freed ones are evicted first, when blocks without content have run out.
3. Two requests that compute the same block at the same time each cache a copy of their own.
4. A preempted request finds its own blocks, also those of its answer, as far as they are left.

What is hard: cost. A copy here is one block of the trace, which may be many blocks of KV. Nothing
is evicted when blocks are allocated, only counted; `_evict` makes up for it before the next request
looks up, caches or frees blocks, which has the same result. And where prompts do not repeat there
are no copies at all: requests that were preempted resume last in first out on their instance, so
two counts say how many blocks are in front of a request's own ones.

Where a trace's block is longer than a KV block: it is found whole or not at all, and the first
evicted KV block makes it unfindable; the rest is evicted before any other. A partly evicted block
can be found in part in vLLM: up to one block of the trace per instance. Requests that end in one
iteration are freed in order of arrival, in vLLM in order of admission; they differ after
preemptions.
"""

import math

from cleave.simulator.cached_copies import (
    add_free_copy,
    begin_use,
    count_kv_blocks,
    create_copy,
    drop_copy,
    drop_link,
    evict,
    find_copy,
    get_num_owned,
    get_owned_copy,
    link_as_newest,
    link_to_block,
    mark_own,
    set_num_owned,
)
from cleave.simulator.kv_blocks import change_usage, count_blocks
from cleave.simulator.prefix_index import observe_oldest_use, record_block
from cleave.simulator.record_access import (
    get_answer,
    get_block,
    get_cache,
    get_copy,
    get_instance,
    get_prompt,
    get_request,
)
from cleave.simulator.records import CACHED, NONE, SENT, Record, State


def has_caches() -> bool:
    """Whether the trace says which prompts begin alike.

    `run` replaces this function by a constant and compiles the loop once for each, so that traffic
    without reuse costs nothing more.
    """
    raise NotImplementedError


def find_cached_prefix(state: State, i: int, r: int) -> int:
    """Tokens of request `r` that instance `i` has cached; `prompt.found` and `prompt.shared` are
    set for `take_cached_prefix` and for the room that it needs."""
    inst, request = get_instance(state, i), get_request(state, r)
    if not has_caches():
        return _count_left(inst, request) * inst.block if request.left else 0
    prompt = get_prompt(state, r)
    prompt.found = 0
    prompt.shared = 0
    prompt.own_found = 0
    if not inst.caches:
        return 0
    _evict(state, i)
    limit = (request.to_compute - 1) // inst.block
    blocks = 0
    while prompt.found < prompt.num_blocks:
        size = count_kv_blocks(state, inst, r, prompt.found)
        if size == 0 or blocks + size > limit:
            break
        block = get_block(state, prompt.first_block + prompt.found).value
        c = find_copy(state, i, block)
        if c == NONE:
            break
        if get_copy(state, c).owners > 0:
            prompt.shared += size
        blocks += size
        prompt.found += 1
    if prompt.own != NONE and prompt.found == prompt.own_after:
        copy = get_copy(state, prompt.own)
        if copy.block == mark_own(r) and copy.instance == i:
            prompt.own_found = copy.size
    cached: int = (blocks + prompt.own_found) * inst.block
    return cached


def _count_left(inst: Record, request: Record) -> int:
    """KV blocks of a request that was preempted on an instance that are still cached there."""
    _count_evicted(inst, inst.free)
    kept: int = min(max(request.left_until - inst.evicted, 0), request.left)
    return kept


def _count_evicted(inst: Record, free: int) -> None:
    """No more blocks can be cached than are free."""
    inst.evicted = max(inst.evicted, inst.cached - free)


def take_cached_prefix(state: State, i: int, r: int, now: float) -> None:
    """Request `r` holds the blocks that `find_cached_prefix` has found on instance `i`."""
    inst, request = get_instance(state, i), get_request(state, r)
    if not has_caches():
        if request.left:
            taken = _count_left(inst, request)
            request.left = 0
            inst.cached -= taken
            change_usage(inst, now, taken, taken * inst.block)
        return
    prompt, cache = get_prompt(state, r), get_cache(state, i)
    taken = 0
    for at in range(prompt.found):
        # Not kept by the search: a request of a central queue had no instance then.
        c = find_copy(state, i, get_block(state, prompt.first_block + at).value)
        copy = get_copy(state, c)
        get_owned_copy(state, i, r, at).value = c
        if copy.owners == 0:
            drop_link(state, i, c)
            cache.size -= copy.size
            taken += copy.size
        copy.owners += 1
        begin_use(state, i, c)
    set_num_owned(state, i, r, prompt.found)
    if prompt.own_found:
        cache.size -= prompt.own_found
        taken += prompt.own_found
        drop_copy(state, i, prompt.own)
    prompt.own = NONE
    if taken:
        change_usage(inst, now, taken, taken * inst.block)


def store_prompt(state: State, i: int, r: int, tokens: int) -> None:
    """Instance `i` has `tokens` of request `r`: its full blocks are cached, and held by it."""
    inst, prompt = get_instance(state, i), get_prompt(state, r)
    if not inst.caches:
        return
    _evict(state, i)
    held = get_num_owned(state, i, r)
    while held < prompt.num_blocks:
        end = min((held + 1) * state.block_tokens, get_request(state, r).prompt)
        size = count_kv_blocks(state, inst, r, held)
        if tokens < end or size == 0:
            break
        block = get_block(state, prompt.first_block + held).value
        c = create_copy(state, i, block, size)
        get_copy(state, c).owners = 1
        link_to_block(state, c)
        if state.cache_view == CACHED:
            record_block(state, i, block)
        get_owned_copy(state, i, r, held).value = c
        held += 1
    set_num_owned(state, i, r, held)


def count_chunk_blocks(state: State, inst: Record, r: int, count: int) -> int:
    """Additional blocks for the next `count` tokens of a prompt."""
    request = get_request(state, r)
    if request.is_whole:
        return 0
    if request.computed == 0:
        return count_blocks(inst, count)
    return count_blocks(inst, request.computed + count) - count_blocks(inst, request.computed)


def free_blocks(state: State, i: int, r: int, tokens: int, now: float) -> None:
    """Free all blocks that request `r`, which has ended, holds on instance `i` for `tokens` of KV.
    They stay cached."""
    _free(state, i, r, tokens, tokens, True, now)


def preempt_blocks(state: State, i: int, r: int, tokens: int, now: float) -> None:
    """Free all blocks that request `r`, which is preempted, holds for `tokens` of KV."""
    inst, request = get_instance(state, i), get_request(state, r)
    cached = tokens
    if inst.schedules_ahead and not inst.defers_free and tokens > request.to_compute:
        # Its latest token is not known yet, so neither is the content of the block that it fills.
        cached -= 1
    _free(state, i, r, tokens, cached, not math.isnan(request.end), now)
    if not has_caches():
        request.left = cached // inst.block if inst.caches else 0
        request.left_until = inst.cached


def evict_all(state: State, i: int) -> None:
    """Members have allocated all free blocks of instance `i`, of which none stays cached."""
    if has_caches():
        evict(state, i, 0)
    else:
        _count_evicted(get_instance(state, i), 0)


def _free(
    state: State, i: int, r: int, tokens: int, cached: int, has_ended: bool, now: float
) -> None:
    """Free blocks for `tokens` of KV, of which the full ones of the first `cached` stay cached."""
    inst = get_instance(state, i)
    blocks = count_blocks(inst, tokens)
    kept = 0
    if has_caches():
        if inst.caches:
            kept = _free_cached(state, i, r, cached, has_ended)
    else:
        _count_evicted(inst, inst.free)
        inst.cached += cached // inst.block
    change_usage(inst, now, kept - blocks, kept * inst.block - tokens)


def _free_cached(state: State, i: int, r: int, tokens: int, has_ended: bool) -> int:
    """Free the copies that a request holds; return how many KV blocks other requests still hold."""
    inst, cache = get_instance(state, i), get_cache(state, i)
    _evict(state, i)
    held = get_num_owned(state, i, r)
    blocks = 0
    for at in range(held):
        blocks += get_copy(state, get_owned_copy(state, i, r, at).value).size
    answered = _count_answer_blocks(state, r, held, tokens) if has_ended else 0
    answer_size = state.block_tokens // inst.block
    # Full blocks after them are cached as well, but by content that no other prompt has.
    others = tokens // inst.block - blocks - answered * answer_size
    if others > 0:
        add_free_copy(state, i, NONE if has_ended else mark_own(r), others)
        if not has_ended:
            prompt = get_prompt(state, r)
            prompt.own, prompt.own_after = cache.newest, held
    for at in range(answered - 1, -1, -1):
        block = get_answer(state, get_prompt(state, r).first_answer + at).value
        add_free_copy(state, i, block, answer_size)
    kept = 0
    for at in range(held - 1, -1, -1):
        c = get_owned_copy(state, i, r, at).value
        copy = get_copy(state, c)
        copy.owners -= 1
        if copy.owners > 0:
            kept += copy.size
        else:
            link_as_newest(state, i, c)
            cache.size += copy.size
    set_num_owned(state, i, r, 0)
    return kept


def _count_answer_blocks(state: State, r: int, held: int, tokens: int) -> int:
    """Blocks of the answer that `tokens` of request `r` fill. They follow those of its prompt."""
    prompt = get_prompt(state, r)
    if prompt.num_answers == 0 or held < prompt.num_blocks:
        return 0
    count: int = min(tokens // state.block_tokens - held, prompt.num_answers)
    return max(count, 0)


def refresh_prefix(state: State, i: int, r: int) -> None:
    """The blocks that the latest search has found on instance `i` have been read by another one,
    as if a request had held them."""
    prompt = get_prompt(state, r)
    for at in range(prompt.found - 1, -1, -1):
        c = find_copy(state, i, get_block(state, prompt.first_block + at).value)
        if get_copy(state, c).owners == 0:
            drop_link(state, i, c)
            link_as_newest(state, i, c)
        begin_use(state, i, c)


def _evict(state: State, i: int) -> None:
    """Evict what has been allocated since the last call: blocks that are free but not cached any
    more. The oldest use of what is left is reported."""
    evict(state, i, get_instance(state, i).free)
    c = get_cache(state, i).first_begun
    if state.cache_view == SENT and c != NONE:
        observe_oldest_use(state, i, get_copy(state, c).used)
