"""What a router can know of the caches of the fleet's engines. Compiled.

Called by `dispatch`, and by `prefix_caches` where dispatch sees what engines cache. The blocks of
each prompt are recorded at the instances that it is sent to; a block is assumed to stay there as
long as the instance has what was used before (`policy.cache_horizon`). `cleave.router`
does so in blocks of its own (`router.prefix_index`). What is hard: these blocks are forgotten one
by one, and each is in two lists, of its instance by use and of all that cache it.
"""

import math

from cleave.policy.cache_horizon import (
    HISTORY_SIZE,
    UNKNOWN,
    find_horizon,
    measure_window,
    record_clock,
)
from cleave.policy.dispatch import TO_PREFILL
from cleave.policy.host_memory import measure_reach
from cleave.policy.prefix_pull import predict_saved_ms
from cleave.policy.prompt_cost import count_mixed, predict_cost_ms, predict_queue_ms
from cleave.simulator.record_access import (
    get_answer,
    get_block,
    get_cache,
    get_clocks,
    get_first_known,
    get_instance,
    get_known,
    get_prompt,
    get_request,
    get_score,
)
from cleave.simulator.records import MIXED, NONE, SENT, State


def find_shortest(state: State, column: int) -> int:
    """The open instance with the shortest wait by the scores of a column; NONE: all are closed."""
    shortest, tokens = NONE, math.inf
    for i in range(state.num_instances):
        score = get_score(state, column * state.num_instances + i).value
        if column != TO_PREFILL:
            score = count_mixed(get_instance(state, i).pending_prompt_tokens, score)
        if score < tokens:
            shortest, tokens = i, score
    return shortest


def find_depth(state: State, r: int, _: int, i: int) -> int:
    """Leading blocks of the prompt of request `r` that instance `i` is known to cache; replaces
    `policy.prompt_cost.find_depth`, as the next five replace others there."""
    prompt = get_prompt(state, r)
    low, high = 0, prompt.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        k = _find_known(state, i, get_block(state, prompt.first_block + middle - 1).value)
        if k != NONE and _is_cached(state, k):
            low = middle
        else:
            high = middle - 1
    return low


def find_holder(state: State, r: int, column: int, depth: int, after: int) -> int:
    """The next KNOWN of block number `depth` at an instance that is open in this column."""
    if after == NONE:
        block = get_block(state, get_prompt(state, r).first_block + depth - 1).value
        k = get_first_known(state, block).value
    else:
        k = get_known(state, after).next
    while k != NONE:
        i = get_known(state, k).instance
        if get_score(state, column * state.num_instances + i).value < math.inf and _is_cached(
            state, k
        ):
            break
        k = get_known(state, k).next
    return int(k)


def get_holder(state: State, k: int) -> int:
    """The instance of a KNOWN."""
    return int(get_known(state, k).instance)


def has_load(state: State, r: int, i: int, depth: int) -> bool:
    """Whether some of these blocks are in the host memory of instance `i` only."""
    return count_loaded(state, i, r, depth) > 0


def count_loaded(state: State, i: int, r: int, depth: int) -> int:
    """Tokens of the first `depth` blocks of the prompt, all of which instance `i` is known to
    cache, that are in its host memory only."""
    inst, cache, prompt = get_instance(state, i), get_cache(state, i), get_prompt(state, r)
    if inst.host_tokens == 0:
        return 0
    # Blocks at the beginning, which other prompts share, were used later.
    low, high = 0, depth
    while low < high:
        middle = (low + high + 1) // 2
        k = _find_known(state, i, get_block(state, prompt.first_block + middle - 1).value)
        if cache.written - get_known(state, k).written <= _measure_capacity(state, i):
            low = middle
        else:
            high = middle - 1
    prompt = get_request(state, r).prompt
    tokens: int = min(depth * state.block_tokens, prompt)
    return tokens - min(low * state.block_tokens, prompt)


def predict_at(state: State, r: int, column: int, i: int, depth: int) -> float:
    """What the prompt of request `r` costs at instance `i` if so many of its blocks are cached."""
    inst, score = get_instance(state, i), get_score(state, column * state.num_instances + i).value
    uncached = float(get_request(state, r).prompt - depth * state.block_tokens)
    pending = inst.pending_prompt_tokens
    if column != TO_PREFILL:
        wait_ms = count_mixed(pending, score) * inst.upper_token_ms
    else:
        wait_ms = predict_queue_ms(score, pending, state.now, inst.upper_token_ms)
    load_ms = 0.0
    if inst.host_tokens > 0:
        load_ms = count_loaded(state, i, r, depth) * inst.host_token
    cost_ms = predict_cost_ms(wait_ms, uncached, inst.prompt_ms, inst.upper_token_ms, load_ms)
    return cost_ms - predict_pull_saving_ms(state, r, column, i, depth)


def predict_pull_saving_ms(state: State, r: int, column: int, i: int, depth: int) -> float:
    """What the prompt of request `r` gains at instance `i`, which is known to cache `depth` blocks
    of it, if it pulls what others have; 0 on instances that also decode."""
    if not state.pulls_prefixes or column != TO_PREFILL:
        return 0.0
    there = float(get_prompt(state, r).known * state.block_tokens)
    here = float(depth * state.block_tokens)
    token_ms = get_instance(state, i).token_ms
    return predict_saved_ms(here, there, token_ms, state.latency, state.token)


def find_source(state: State, r: int, i: int) -> int:
    """The instance that is known to have most of the prompt of request `r`, other than `i`. Of
    several the first that got it: later ones may not have computed it yet."""
    prompt = get_prompt(state, r)
    source = NONE
    if prompt.known == 0:
        return source
    block = get_block(state, prompt.first_block + prompt.known - 1).value
    k = get_first_known(state, block).value
    while k != NONE:
        known = get_known(state, k)
        if known.instance != i and _is_cached(state, k):
            source = int(known.instance)
        k = known.next
    return source


def find_known_depth(state: State, r: int) -> int:
    """Number of leading blocks of a prompt that any instance is known to cache."""
    prompt = get_prompt(state, r)
    # Where a block is known, all blocks before it are: later ones are forgotten first.
    low, high = 0, prompt.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        k = get_first_known(state, get_block(state, prompt.first_block + middle - 1).value).value
        while k != NONE and not _is_cached(state, k):
            k = get_known(state, k).next
        if k != NONE:
            low = middle
        else:
            high = middle - 1
    return low


def predict_bound(state: State, r: int, column: int, least: int, depth: int) -> float:
    """Lower bound of what the prompt costs anywhere if so many of its blocks are cached."""
    inst, score = get_instance(state, least), get_score(state, column * state.num_instances + least)
    uncached = float(get_request(state, r).prompt - depth * state.block_tokens)
    if column != TO_PREFILL:
        wait_ms = count_mixed(inst.pending_prompt_tokens, score.value) * inst.upper_token_ms
    else:
        wait_ms = predict_queue_ms(score.value, 0.0, state.now, inst.upper_token_ms)
    cost_ms = predict_cost_ms(wait_ms, uncached, inst.prompt_ms, inst.upper_token_ms, 0.0)
    return cost_ms - predict_pull_saving_ms(state, r, column, least, depth)


def count_known_tokens(state: State, i: int, r: int) -> int:
    """Tokens of the prompt of request `r` that instance `i` is known to cache."""
    return min(find_depth(state, r, NONE, i) * state.block_tokens, get_request(state, r).prompt)


def record_prompt(state: State, i: int, r: int, written: float, answers: bool = False) -> None:
    """Request `r` was sent to instance `i`, which will write `written` tokens of KV for it;
    `answers`: also those of its answer."""
    prompt, inst, cache = get_prompt(state, r), get_instance(state, i), get_cache(state, i)
    if answers:
        for at in range(prompt.num_answers - 1, -1, -1):
            record_block(state, i, get_answer(state, prompt.first_answer + at).value)
    full = min(prompt.num_blocks, get_request(state, r).prompt // state.block_tokens)
    # Engines evict the end of a prompt first.
    for at in range(full - 1, -1, -1):
        record_block(state, i, get_block(state, prompt.first_block + at).value)
    cache.written += written
    capacity = float(inst.blocks * inst.block)
    begin_ms = state.now + inst.pending_prompt_tokens * inst.upper_token_ms
    clocks = get_clocks(state, i * HISTORY_SIZE, HISTORY_SIZE)
    record_clock(clocks, begin_ms, cache.written, capacity)
    # Those that a later report may bring back are kept.
    reach = _measure_reach(state, i, capacity)
    while state.cache_view == SENT and cache.first_used != NONE:
        known = get_known(state, cache.first_used)
        if cache.written - known.written <= reach:
            break
        forget_block(state, i, known.block)


def observe_oldest_use(state: State, i: int, used_ms: float) -> None:
    """Instance `i` reports to the router when the latest use of a block began that is the oldest
    one."""
    inst, cache = get_instance(state, i), get_cache(state, i)
    if used_ms == cache.reported:
        return
    cache.reported, cache.horizon = used_ms, UNKNOWN
    if inst.role == MIXED:
        clocks = get_clocks(state, i * HISTORY_SIZE, HISTORY_SIZE)
        cache.horizon = find_horizon(clocks, used_ms)


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


def _is_cached(state: State, k: int) -> bool:
    """Whether the instance of a KNOWN probably has the block, on its GPU or in host memory."""
    if state.cache_view != SENT:
        return True
    known = get_known(state, k)
    written = get_cache(state, known.instance).written - known.written
    reach = _measure_reach(state, known.instance, _measure_capacity(state, known.instance))
    is_cached: bool = written <= reach
    return is_cached


def _measure_capacity(state: State, i: int) -> float:
    inst, cache = get_instance(state, i), get_cache(state, i)
    return measure_window(cache.written, cache.horizon, float(inst.blocks * inst.block))


def _measure_reach(state: State, i: int, capacity: float) -> float:
    """How much is written while its KV, which keeps a block for `capacity`, or its host memory has
    it."""
    inst, cache = get_instance(state, i), get_cache(state, i)
    if inst.host_tokens == 0:
        return capacity
    return measure_reach(capacity, float(inst.host_tokens), cache.written, cache.stored)


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
