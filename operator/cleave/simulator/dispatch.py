"""Which instances take a request, with the router's accounting and decisions. Compiled.

What is hard: the router counts a request from the moment it is dispatched, not from the moment it
is computed, so load is counted here as in `cleave.router`: prompt tokens until the first token;
prompt and output tokens of a decode instance's requests until they end. And best fit needs the
remaining tokens of every request of an instance, which the router can only estimate from how long
each has decoded; the same estimate is used here, although the simulation knows the exact number.
"""

import math

from cleave.policy.admission import sort_by_left
from cleave.policy.best_fit import (
    compute_context_weight,
    compute_saved_ms,
    count_context,
    exclude_prompts,
    find_best_fit,
    keeps_running,
    measure_fullness,
)
from cleave.policy.dispatch import (
    FULLEST,
    HEAVY_OUTPUT_TOKENS,
    LIGHTEST,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    Scores,
    choose_least_pair,
    compute_headroom,
    compute_heavy_ratio,
    computes_short,
    find_least,
    find_slot,
    score,
    select_pair,
)
from cleave.policy.output_length import guess_progress
from cleave.policy.prompt_cost import find_cheapest
from cleave.policy.queue_model import add_completion, compute_mean_token_ms, fit_prompt_times
from cleave.simulator import records
from cleave.simulator.kv_blocks import fits_instance
from cleave.simulator.outcome import RequestOutcome
from cleave.simulator.prefix_caches import has_caches
from cleave.simulator.prefix_index import (
    count_known_tokens,
    count_loaded,
    find_depth,
    find_known_depth,
    find_shortest,
    find_source,
    predict_pull_saving_ms,
    record_prompt,
)
from cleave.simulator.record_access import (
    get_cache,
    get_instance,
    get_prompt,
    get_request,
    get_score,
    get_scores,
    read_amounts,
)
from cleave.simulator.records import (
    HEADROOM,
    HEAVINESS,
    MIXED,
    NONE,
    NOTHING,
    PENDING_PROMPT,
    PREFILL,
    ROOM,
    State,
)


def dispatch_request(state: State, r: int) -> None:
    """Choose the instances of an arriving request and add it to their load."""
    request = get_request(state, r)
    if state.is_deferred:
        if not _fits_fleet(state, r):
            request.outcome = RequestOutcome.TOO_LONG
        return
    first, second = NONE, NONE
    limit = state.short_prompt_tokens
    # Of a longer one enough may be cached.
    is_short = limit > 0 and (request.prompt <= limit or knows_caches(state))
    if is_short and state.has_prefill and state.has_decode:
        second = select_for_short_prompt(state, r)
    if second == NONE:
        first, second = select_instances(state, r)
    if (first != NONE and not fits_instance(state, first, r)) or (
        second != NONE and not fits_instance(state, second, r)
    ):
        request.outcome = RequestOutcome.TOO_LONG
        return
    request.prefill = first
    request.decode = second
    _add_load(state, r)


def knows_caches(state: State) -> bool:
    """Whether dispatch compares what prompts cost where they are cached."""
    return has_caches() and state.cache_view != NOTHING


def select_instances(state: State, r: int) -> tuple[int, int]:
    """(prefill, decode) instance of a request; NONE: phase not simulated, or same instance."""
    count = state.num_instances
    if state.has_prefill and state.has_decode:
        decode = get_scores(state, TO_DECODE * count, count)
        pending_prompt = get_scores(state, PENDING_PROMPT * count, count)
        headroom = get_scores(state, HEADROOM * count, count)
        if state.is_by_score:
            prefill = get_scores(state, TO_PREFILL * count, count)
            mixed = get_scores(state, TO_WHOLE * count, count)
            return choose_least_pair(prefill, decode, mixed, pending_prompt, headroom)
        return select_pair(state, state, r, decode, pending_prompt, headroom)
    if state.has_prefill:
        return find(state, TO_PREFILL, r, NONE), NONE
    return NONE, find(state, TO_DECODE, r, NONE)


def select_for_short_prompt(state: State, r: int) -> int:
    """A decode instance that computes a short prompt itself; NONE: none does."""
    count = state.num_instances
    if knows_caches(state):
        i = _find_by_cost(state, TO_DECODE, r)
    else:
        i = _find_in(state, get_scores(state, TO_DECODE * count, count), TO_WHOLE, r)
    if i == NONE:
        return NONE
    first = find_least(get_scores(state, TO_PREFILL * count, count))
    queue = get_instance(state, first).pending_prompt_tokens if first != NONE else math.inf
    pending = get_instance(state, i).pending_prompt_tokens
    uncached = get_request(state, r).prompt
    if knows_caches(state):
        uncached -= count_known_tokens(state, i, r)
    return i if computes_short(uncached, pending, queue, state.short_prompt_tokens) else NONE


def find(state: State, purpose: int, r: int, _: int) -> int:
    """The slot for a purpose; replaces `policy.dispatch.find_for`."""
    count = state.num_instances
    return _find_in(state, get_scores(state, purpose * count, count), purpose, r)


def count_cached(state: State, r: int, i: int) -> float:
    """Tokens of the prompt that instance `i` is known to cache; replaces
    `policy.dispatch.count_cached_for`."""
    return float(count_known_tokens(state, i, r)) if knows_caches(state) else 0.0


def _find_in(state: State, values: Scores, purpose: int, r: int) -> int:
    """The slot that the policy's rule picks by the scores `values`."""
    if knows_caches(state) and purpose != TO_DECODE:
        return _find_by_cost(state, purpose, r)
    count = state.num_instances
    pick = state.prefill_pick if purpose == TO_PREFILL else state.decode_pick
    request = get_request(state, r)
    if pick == FULLEST:
        slot = _find_best_fit(state, values, r, purpose == TO_WHOLE)
        if slot != NONE:
            return slot
    need = request.prompt + request.predicted
    room = get_scores(state, ROOM * count, count)
    heaviness = get_scores(state, HEAVINESS * count, count)
    slot, state.random = find_slot(
        pick, values, room, heaviness, need, request.predicted, state.random
    )
    return slot


def _find_by_cost(state: State, column: int, r: int) -> int:
    """The slot where the prompt costs least, given what is known of caches."""
    depth = find_known_depth(state, r)
    get_prompt(state, r).known = depth
    count = state.num_instances
    if not depth:
        return find_least(get_scores(state, column * count, count))
    least = find_shortest(state, column)
    return find_cheapest(state, r, column, least, least, depth) if least != NONE else NONE


def _find_best_fit(state: State, values: Scores, r: int, prefills: bool) -> int:
    count = state.num_instances
    request, fullness = get_request(state, r), get_scores(state, records.FULLNESS * count, count)
    need = compute_context_weight(request.prompt, request.predicted, state.gamma)
    for i in range(count):
        inst = get_instance(state, i)
        fullness[i] = measure_fullness(
            values[i],
            inst.num_assigned,
            inst.weighted_context,
            inst.pending_prompt_tokens,
            request.prompt,
            need,
            prefills,
            state,
            state,
        )
    return find_best_fit(fullness, state, r, prefills)


def check(state: State, i: int, r: int, prefills: bool) -> bool:
    """Whether instance `i` keeps running with `r`; replaces `policy.best_fit.check`."""
    inst, new = get_instance(state, i), get_request(state, r)
    size = inst.num_assigned + 1
    held, left = read_amounts(state, 0, size), read_amounts(state, size, size)
    held[0], left[0] = new.prompt, new.predicted
    need = compute_context_weight(new.prompt, new.predicted, state.gamma)
    context = 0.0
    step_ms = state.k2 * inst.weighted_context + state.c2 * inst.num_assigned + state.c3
    saved_ms = math.inf
    at = 1
    other = inst.first_assigned
    while other != NONE:
        request = get_request(state, other)
        held[at], left[at] = request.prompt, request.predicted
        if not math.isnan(request.prefill_end):
            decoding_ms = state.now - request.prefill_end
            prompt_tokens = inst.computed_tokens - request.prompts_before
            own_ms = exclude_prompts(decoding_ms, prompt_tokens, state.k1)
            generated, left[at] = guess_progress(request.predicted, own_ms, step_ms)
            held[at] += generated
            spare_ms = compute_saved_ms(generated + 1.0, decoding_ms, state.tpot_ms, state.theta)
            saved_ms = min(saved_ms, spare_ms)
        weight = compute_context_weight(request.prompt, request.predicted, state.gamma)
        context += count_context(weight, held[at])
        at += 1
        other = request.next_assigned
    sort_by_left(held, left)
    return keeps_running(
        held,
        left,
        inst.num_assigned,
        context,
        need,
        saved_ms,
        inst.pending_prompt_tokens,
        new.prompt,
        prefills,
        inst.blocks * inst.block,
        state,
        state,
    )


def _fits_fleet(state: State, r: int) -> bool:
    """Whether some mixed instance, or a prefill and a decode instance, could serve request `r`."""
    can_prefill = not state.has_prefill
    can_decode = not state.has_decode
    for i in range(state.num_instances):
        role = get_instance(state, i).role
        if fits_instance(state, i, r):
            can_prefill = can_prefill or role != records.DECODE
            can_decode = can_decode or role != PREFILL
    return can_prefill and can_decode


def _add_load(state: State, r: int) -> None:
    request = get_request(state, r)
    state.num_picks += 1
    i = request.prefill if request.prefill != NONE else request.decode
    if state.has_prefill:
        inst = get_instance(state, i)
        if inst.pending_prompt_tokens == 0:
            inst.head_started_ms = state.now
        if knows_caches(state):
            _record_prompt(state, r, i)
        inst.pending_prompt_tokens += _count_uncached(state, r)
        inst.waiting += 1
        inst.last_pick = state.num_picks
        if request.prefill != NONE:
            inst.requests += 1
        update_scores(state, i)
    if request.decode != NONE:
        inst = get_instance(state, request.decode)
        inst.resident_tokens += request.prompt + request.predicted
        inst.last_pick = state.num_picks
        inst.requests += 1
        _link_assigned(state, r)
        update_scores(state, request.decode)


def _record_prompt(state: State, r: int, i: int) -> None:
    """Record that instance `i` computes the prompt of request `r`, and what of it is cached."""
    request, prompt = get_request(state, r), get_prompt(state, r)
    depth = find_depth(state, r, NONE, i)
    prompt.uncached = max(request.prompt - depth * state.block_tokens, 0)
    prompt.to_load = count_loaded(state, i, r, depth)
    get_cache(state, i).stored += prompt.uncached
    written = float(prompt.uncached + prompt.to_load)
    if request.decode == NONE or request.decode == i:
        record_prompt(state, i, r, written + request.predicted, True)
        return
    if state.pulls_prefixes:
        _choose_source(state, r, i)
    record_prompt(state, i, r, written)
    # What a decode instance caches matters only if it may compute prompts.
    may_flip = state.next_flip_check < math.inf
    is_mixed = get_instance(state, request.decode).role == MIXED
    if is_mixed or may_flip or state.short_prompt_tokens > 0 or state.pulls_prefixes:
        record_prompt(state, request.decode, r, request.prompt + request.predicted, True)


def _choose_source(state: State, r: int, i: int) -> None:
    """Where instance `i` may pull from what it lacks of the prompt of request `r`. It knows best
    what that is, so a source is named also where nothing is expected to be pulled."""
    prompt = get_prompt(state, r)
    if predict_pull_saving_ms(state, r, TO_PREFILL, i, 0) <= 0.0:
        return
    prompt.source = find_source(state, r, i)
    depth = (get_request(state, r).prompt - prompt.uncached) // state.block_tokens
    if prompt.source == NONE or predict_pull_saving_ms(state, r, TO_PREFILL, i, depth) <= 0.0:
        # An engine pulls before it looks at host memory, so it must not try what is there.
        if prompt.to_load > 0:
            prompt.source = NONE
        return
    prompt.is_pulled = 1
    prompt.uncached = max(get_request(state, r).prompt - prompt.known * state.block_tokens, 0)


def _count_uncached(state: State, r: int) -> int:
    """Prompt tokens that the router expects to be computed."""
    if knows_caches(state):
        uncached: int = get_prompt(state, r).uncached
        return uncached
    tokens: int = get_request(state, r).prompt
    return tokens


def _link_assigned(state: State, r: int) -> None:
    """Add request `r` to the list of requests assigned to its decode instance."""
    request = get_request(state, r)
    inst = get_instance(state, request.decode)
    inst.weighted_context += compute_context_weight(request.prompt, request.predicted, state.gamma)
    inst.num_assigned += 1
    if request.predicted > HEAVY_OUTPUT_TOKENS:
        inst.heavy += 1
    request.previous_assigned = NONE
    request.next_assigned = inst.first_assigned
    if inst.first_assigned != NONE:
        get_request(state, inst.first_assigned).previous_assigned = r
    inst.first_assigned = r


def remove_prompt_load(state: State, r: int) -> None:
    """Remove the prompt of request `r` from the load: it is computed."""
    if state.is_deferred:
        return
    request = get_request(state, r)
    i = request.prefill if request.prefill != NONE else request.decode
    inst = get_instance(state, i)
    tokens = _count_uncached(state, r)
    inst.pending_prompt_tokens -= tokens
    inst.waiting -= 1
    inst.computed_tokens += tokens
    if request.decode != NONE:
        request.prompts_before = get_instance(state, request.decode).computed_tokens
    if tokens > 0 and not (knows_caches(state) and _is_partly_moved(state, r)):
        _learn_prompt_times(state, i, tokens)
    inst.head_started_ms = state.now
    if request.prefill != NONE:
        inst.requests -= 1
    update_scores(state, i)


def _is_partly_moved(state: State, r: int) -> bool:
    """Whether a part of the prompt is pulled or copied back: then the time says nothing of
    computing."""
    prompt = get_prompt(state, r)
    is_moved: bool = prompt.is_pulled + prompt.to_load > 0
    return is_moved


def _learn_prompt_times(state: State, i: int, tokens: int) -> None:
    """Instance `i` has computed `tokens` of a prompt since its queue's first prompt started."""
    inst = get_instance(state, i)
    sums = add_completion(
        (
            inst.sum_iterations,
            inst.sum_prompts,
            inst.sum_tokens,
            inst.sum_inverses,
            inst.sum_ms,
            inst.sum_rates,
            inst.sum_squares,
            inst.sum_last_tokens,
            inst.sum_last_ms,
        ),
        float(tokens),
        state.now - inst.head_started_ms,
    )
    inst.prompt_ms, inst.token_ms, inst.upper_token_ms = fit_prompt_times(sums)
    (
        inst.sum_iterations,
        inst.sum_prompts,
        inst.sum_tokens,
        inst.sum_inverses,
        inst.sum_ms,
        inst.sum_rates,
        inst.sum_squares,
        inst.sum_last_tokens,
        inst.sum_last_ms,
    ) = sums


def remove_resident_load(state: State, r: int) -> None:
    """Remove request `r`, which has ended, from the load of its decode instance."""
    request = get_request(state, r)
    if state.is_deferred or request.decode == NONE:
        return
    inst = get_instance(state, request.decode)
    inst.resident_tokens -= request.prompt + request.predicted
    inst.weighted_context -= compute_context_weight(request.prompt, request.predicted, state.gamma)
    inst.requests -= 1
    inst.num_assigned -= 1
    if request.predicted > HEAVY_OUTPUT_TOKENS:
        inst.heavy -= 1
    if request.previous_assigned != NONE:
        get_request(state, request.previous_assigned).next_assigned = request.next_assigned
    else:
        inst.first_assigned = request.next_assigned
    if request.next_assigned != NONE:
        get_request(state, request.next_assigned).previous_assigned = request.previous_assigned
    update_scores(state, request.decode)


def update_scores(state: State, i: int) -> None:
    """Recompute the scores of an instance, as the router does."""
    inst, count = get_instance(state, i), state.num_instances
    first, total = score(
        state.counts,
        inst.pending_prompt_tokens,
        inst.waiting,
        inst.resident_tokens * inst.kv_weight,
        inst.requests,
        inst.last_pick,
        inst,
        0.0,
        inst.role == PREFILL,
    )
    get_score(state, PENDING_PROMPT * count + i).value = inst.pending_prompt_tokens
    if inst.role == PREFILL:
        get_score(state, TO_PREFILL * count + i).value = first
        prompts = inst.sum_prompts / inst.sum_tokens
        mean_token_ms = compute_mean_token_ms(inst.prompt_ms, inst.token_ms, prompts)
        headroom = compute_headroom(state.headroom_ms, mean_token_ms)
        get_score(state, HEADROOM * count + i).value = headroom
        return
    get_score(state, TO_DECODE * count + i).value = total
    if inst.role == MIXED:
        get_score(state, TO_WHOLE * count + i).value = total
    if state.decode_pick == LIGHTEST:
        get_score(state, ROOM * count + i).value = inst.blocks * inst.block - inst.resident_tokens
        get_score(state, HEAVINESS * count + i).value = compute_heavy_ratio(
            inst.heavy, inst.num_assigned - inst.heavy
        )
