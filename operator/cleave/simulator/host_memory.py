"""Copies of KV in the host memory of simulated engines, with vLLM's rules. Compiled.

Called where prompts are admitted and where requests end. The rules are in `policy.host_memory`;
that of eviction is the one of `cached_copies`, whose free copies these are.

What is hard: blocks are copied here when their request ends, in vLLM when they are computed. A
request that finds them meanwhile finds them on the GPU; but what runs takes no room here yet. And
requests that were preempted compute again what vLLM would copy back.
"""

from cleave.simulator.cached_copies import (
    add_free_copy,
    count_kv_blocks,
    drop_link,
    evict,
    find_copy,
    get_num_owned,
    get_owned_copy,
    link_as_newest,
)
from cleave.simulator.prefix_caches import free_blocks, has_caches
from cleave.simulator.record_access import (
    get_block,
    get_copy,
    get_instance,
    get_prompt,
    get_request,
)
from cleave.simulator.records import NONE, State


def find_loadable(state: State, i: int, r: int, cached: int) -> int:
    """Tokens of request `r` that instance `i` has in host memory after the `cached` ones that it
    has on its GPU, by the latest `find_cached_prefix`; never its last token."""
    inst, request, prompt = get_instance(state, i), get_request(state, r), get_prompt(state, r)
    if request.preemptions > 0:
        return 0
    limit = (request.to_compute - 1) // inst.block
    blocks = cached // inst.block
    for at in range(prompt.found, prompt.num_blocks):
        size = count_kv_blocks(state, inst, r, at)
        if size == 0 or blocks + size > limit:
            break
        block = get_block(state, prompt.first_block + at).value
        if find_copy(state, state.num_instances + i, block) == NONE:
            break
        blocks += size
    loadable: int = blocks * inst.block - cached
    return loadable


def retire_blocks(state: State, i: int, r: int, tokens: int, now: float) -> None:
    """`free_blocks` of a request that has ended on instance `i`, whose host memory keeps the blocks
    of its prompt."""
    if has_caches() and get_instance(state, i).host_blocks > 0:
        _keep_prompt(state, i, r)
    free_blocks(state, i, r, tokens, now)


def _keep_prompt(state: State, i: int, r: int) -> None:
    """Copy what the request holds of its prompt, its first block as the one used last."""
    inst, host, rest = get_instance(state, i), state.num_instances + i, get_request(state, r).prompt
    rest //= inst.block
    held = get_num_owned(state, i, r)
    for at in range(held):
        rest -= get_copy(state, get_owned_copy(state, i, r, at).value).size
    if rest > 0:
        add_free_copy(state, host, NONE, rest)
    for at in range(held - 1, -1, -1):
        copy = get_copy(state, get_owned_copy(state, i, r, at).value)
        c = find_copy(state, host, copy.block)
        if c == NONE:
            add_free_copy(state, host, copy.block, copy.size)
        else:
            drop_link(state, host, c)
            link_as_newest(state, host, c)
    evict(state, host, inst.host_blocks)
