"""Beginnings of prompts that a prefill instance pulls from another one's prefix cache, or that an
instance copies back from its host memory. Compiled.

Called by `batching` when prompts are at the head of their queue: pulls for those that dispatch has
given a source (`policy.prefix_pull`). As in vLLM's connectors other prompts are computed meanwhile.
What is hard: dispatch guesses what the source has; so it is looked up when the pull begins, and the
rest is computed. And prompts that hold blocks while they wait could wait for each other forever: so
blocks for all of a prompt are allocated at once, and it goes before those that hold none.
"""

from cleave.simulator.prefix_caches import (
    find_cached_prefix,
    has_caches,
    refresh_prefix,
    store_prompt,
)
from cleave.simulator.queues import push_loaded
from cleave.simulator.record_access import get_instance, get_prompt, get_request, get_slot
from cleave.simulator.records import NONE, State
from cleave.simulator.transfers import push_pull


def find_fetchable(state: State, r: int, cached: int) -> int:
    """Tokens of the prompt of request `r` that its source has cached in addition to the `cached`
    ones here; 0 also if it has none to pull. The search is one on the source: it is to be followed
    by another here."""
    prompt = get_prompt(state, r)
    if prompt.source == NONE or prompt.fetched > 0:
        return 0
    return max(find_cached_prefix(state, prompt.source, r) - cached, 0)


def start_fetch(state: State, s: int, i: int, r: int, tokens: int, now: float) -> None:
    """Instance `i` pulls `tokens` of the prompt of request `r` from the cache of its source.

    One prefix after another leaves the source's link, and enters `i`. That a card receives KV for
    decoding at the same time is neglected: instances with prompts do not.
    """
    prompt, inst, slot = get_prompt(state, r), get_instance(state, i), get_slot(state, s)
    source = get_instance(state, prompt.source)
    begin = max(now, inst.inbound)
    if state.is_shared:
        begin = max(begin, source.link)
    end = begin + state.latency + tokens * state.token
    source.link = end
    inst.inbound = end
    prompt.fetched = tokens
    if slot.pulls == 0:
        slot.pulls = state.receiver
    slot.pulls += tokens * state.receiver_token
    find_cached_prefix(state, prompt.source, r)
    refresh_prefix(state, prompt.source, r)
    push_pull(state, end, r)


def start_load(state: State, i: int, r: int, tokens: int, now: float) -> None:
    """Instance `i` copies `tokens` of the prompt of request `r` back from its host memory, after
    those of other prompts, over a link of its own."""
    inst = get_instance(state, i)
    inst.host_link = max(now, inst.host_link) + tokens * inst.host_token
    get_prompt(state, r).loaded = tokens
    push_pull(state, inst.host_link, r)


def end_fetch(state: State, r: int, now: float) -> int:
    """The beginning of the prompt of request `r` has arrived: the rest may be computed. Returns the
    instance that does so."""
    request, prompt = get_request(state, r), get_prompt(state, r)
    i: int = request.prefill if request.prefill != NONE else request.decode
    request.computed += prompt.fetched + prompt.loaded
    store_prompt(state, i, r, request.computed)
    request.queued = now
    push_loaded(state, i, r)
    return i


def is_fetching(state: State, r: int) -> bool:
    """Whether the transfer of request `r` is that of its prompt's beginning."""
    if not has_caches():
        return False
    prompt = get_prompt(state, r)
    fetches: bool = prompt.fetched + prompt.loaded > 0 and get_request(state, r).is_pulled == 0
    return fetches
