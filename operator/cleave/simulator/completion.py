"""What happens at the end of an iteration: tokens, ended requests, computed prompts. Compiled."""

import math

from cleave.simulator.dispatch import close_prompt, close_resident
from cleave.simulator.event_tree import wake
from cleave.simulator.iterations import cut_leap, find_busy_ms, keep_last_pass, sum_passes
from cleave.simulator.kv_blocks import count_blocks, count_growth, hold
from cleave.simulator.queues import add_member, heap_remove, push, remove_member
from cleave.simulator.record_access import instance_at, key_at, request_at, slot_at
from cleave.simulator.records import NONE, State


def complete(state: State, i: int, s: int, now: float) -> None:
    """The iterations of slot `s` are over: remove ended requests, complete computed prompts."""
    slot, inst = slot_at(state, s), instance_at(state, i)
    passes = slot.passes
    inst.busy += find_busy_ms(inst, slot)
    inst.passes += passes
    inst.batch_peak = max(inst.batch_peak, slot.rows)
    slot.passes = 0
    if slot.decodes:
        _advance(state, i, s, passes, now)
    r = slot.prompts
    slot.prompts = NONE
    while r != NONE:
        next_r = request_at(state, r).next
        _end_prompt(state, i, s, r, now)
        r = next_r


def alert(state: State, i: int, now: float) -> None:
    """Make instance `i` look for new work as soon as its current iterations allow."""
    inst = instance_at(state, i)
    # With one stage nothing else can start during the leap, so its end accounts for it.
    interrupt(state, i, now, inst.stages > 1)
    wake(state, i, now)


def interrupt(state: State, i: int, now: float, is_accounted: bool) -> None:
    """Cut the leap of instance `i`, if there is one, after the current iteration.

    `is_accounted`: account for all iterations before the current one now, because another batch may
    start or memory may be freed before the current one ends.
    """
    inst = instance_at(state, i)
    s = inst.oldest
    if inst.in_flight != 1 or slot_at(state, s).passes == 1:
        return
    slot = slot_at(state, s)
    cut_leap(slot, now)
    if not is_accounted:
        return
    passes = slot.passes - 1
    if passes > 0:
        _account(state, i, s, passes, now)
    keep_last_pass(state, i, s)


def _account(state: State, i: int, s: int, passes: int, now: float) -> None:
    """Account for the first `passes` iterations of a leap, whose memory other events now see."""
    slot, inst = slot_at(state, s), instance_at(state, i)
    slot.passes = passes
    inst.busy += find_busy_ms(inst, slot)
    inst.passes += passes
    idle_ms = now - slot.begin - sum_passes(slot, passes)
    _advance(state, i, s, passes, now)
    inst.kv_area += slot.batch * passes * idle_ms
    inst.free -= count_growth(state, inst, s, slot.steps, slot.steps + 1)
    slot.passes = passes + 1


def _advance(state: State, i: int, s: int, passes: int, now: float) -> None:
    """Each member has generated `passes` tokens; remove the members that have ended."""
    slot, inst = slot_at(state, s), instance_at(state, i)
    batch = slot.batch
    blocks = 0
    if passes > 1:
        blocks = count_growth(state, inst, s, slot.steps + 1, slot.steps + passes)
        earlier = passes * (passes - 1) / 2
        squares = earlier * (2 * passes - 1) / 3
        inst.kv_area += batch * (slot.first * earlier + slot.change * squares)
    hold(inst, now, blocks, batch * passes)
    slot.steps += passes
    slot.context += batch * passes
    inst.decode_passes += passes
    inst.decode_tokens += batch * passes
    while slot.batch > 0:
        key = key_at(state, s * state.heap_size).value
        if key >> 32 > slot.steps:
            break
        heap_remove(state, s, slot.batch, key)
        r = key & 0xFFFFFFFF
        tokens = remove_member(state, i, s, r)
        hold(inst, now, -count_blocks(inst, tokens), -tokens)
        inst.running -= 1
        end_request(state, r, now)


def _end_prompt(state: State, i: int, s: int, r: int, now: float) -> None:
    """All KV of a prompt is computed, which yields an output token."""
    inst, request = instance_at(state, i), request_at(state, r)
    if math.isnan(request.prefill_end):
        request.prefill_end = now
        close_prompt(state, r)
    if request.prefill == i:
        inst.running -= 1
        _end_prefill(state, i, r, now)
        return
    request.made += 1
    if math.isnan(request.first_token):
        request.first_token = now
    if math.isnan(request.transfer_start):
        request.transfer_start = now
        request.transfer_end = now
    if request.made == request.output:
        inst.running -= 1
        hold(inst, now, -count_blocks(inst, request.computed), -request.computed)
        end_request(state, r, now)
    else:
        add_member(state, i, s, r)


def _end_prefill(state: State, i: int, r: int, now: float) -> None:
    """A prefill instance has computed a prompt: end the request or offer its KV for the pull."""
    inst, request = instance_at(state, i), request_at(state, r)
    if not state.has_decode or not state.first_by_decode:
        request.made = 1
        request.todo = request.prompt + 1
        request.first_token = now
    if not state.has_decode or request.made == request.output:
        hold(inst, now, -count_blocks(inst, request.prompt), -request.prompt)
        end_request(state, r, now)
        return
    request.is_pulled = 1
    push(state, 2 * state.num_instances, r)


def end_request(state: State, r: int, now: float) -> None:
    """All output tokens of request `r` are generated."""
    request_at(state, r).end = now
    close_resident(state, r)
