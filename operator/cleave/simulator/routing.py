"""Which instances take a request, with the router's own books and decisions. Compiled.

What is hard: the router counts a request from the moment it is placed, not from the moment it is
computed, so the books are kept here as `cleave.router` keeps them: prompt tokens until the prompt
is answered, prompt and output tokens of what decodes until it ends.
"""

from cleave.policy.dispatch import RECENCY, choose_pair, find_least
from cleave.simulator.fleet import Dispatch
from cleave.simulator.layout import DECODE, MIXED, NONE, PREFILL, State
from cleave.simulator.memory import fits
from cleave.simulator.outcome import Fate
from cleave.simulator.rows import instance_at, request_at, score_at, scores


def place(state: State, r: int) -> None:
    """Choose the instances of an arriving request and enter it in their books."""
    request = request_at(state, r)
    if state.dispatch == Dispatch.LATE:
        if not _fits_somewhere(state, r):
            request.fate = Fate.TOO_LONG
        return
    if state.dispatch == Dispatch.LEAST_PENDING:
        count = state.num_instances
        if not state.has_decode:
            first, second = find_least(scores(state, 0, count)), NONE
        elif not state.has_prefill:
            first, second = NONE, find_least(scores(state, count, count))
        else:
            first, second = choose_pair(
                scores(state, 0, count),
                scores(state, count, count),
                scores(state, 2 * count, count),
                scores(state, 3 * count, count),
            )
    else:
        first, second = _take_turns(state)
    if (first != NONE and not fits(state, first, r)) or (
        second != NONE and not fits(state, second, r)
    ):
        request.fate = Fate.TOO_LONG
        return
    request.prefill = first
    request.decode = second
    _enter(state, r)


def _fits_somewhere(state: State, r: int) -> bool:
    """Whether some mixed instance, or a prefill and a decode instance, could serve request `r`."""
    can_prefill = not state.has_prefill
    can_decode = not state.has_decode
    for i in range(state.num_instances):
        role = instance_at(state, i).role
        if fits(state, i, r):
            can_prefill = can_prefill or role != DECODE
            can_decode = can_decode or role != PREFILL
    return can_prefill and can_decode


def _take_turns(state: State) -> tuple[int, int]:
    """Round robin or random over those that take prompts, then over those that decode."""
    if not state.has_prefill:
        return NONE, _take_turn(state, DECODE)
    first = _take_turn(state, PREFILL)
    if instance_at(state, first).role == MIXED:
        return NONE, first
    return first, _take_turn(state, DECODE) if state.has_decode else NONE


def _take_turn(state: State, role: int) -> int:
    """The next instance of a role; mixed ones have both."""
    num_instances = state.num_instances
    at = state.entry if role == PREFILL else state.decoder
    skip = 0
    if state.dispatch == Dispatch.RANDOM:
        candidates = 0
        for i in range(num_instances):
            if instance_at(state, i).role == role or instance_at(state, i).role == MIXED:
                candidates += 1
        skip = _draw(state, candidates)
        at = 0
    for _ in range(2 * num_instances):
        i = at % num_instances
        at += 1
        if instance_at(state, i).role == role or instance_at(state, i).role == MIXED:
            if skip == 0:
                break
            skip -= 1
    if role == PREFILL:
        state.entry = at
    else:
        state.decoder = at
    return i


def _draw(state: State, count: int) -> int:
    """A number below `count` (Park and Miller's generator)."""
    state.random = state.random * 48271 % 2147483647
    return state.random * count // 2147483647


def _enter(state: State, r: int) -> None:
    request = request_at(state, r)
    state.turn += 1
    first = request.prefill if request.prefill != NONE else request.decode
    if state.has_prefill:
        inst = instance_at(state, first)
        inst.prompt_book += request.prompt
        inst.turn = state.turn
        _score(state, first)
    if request.decode != NONE:
        inst = instance_at(state, request.decode)
        inst.resident_book += request.prompt + request.output
        inst.turn = state.turn
        _score(state, request.decode)


def close_prompt(state: State, r: int) -> None:
    """The prompt of request `r` is answered."""
    if state.dispatch == Dispatch.LATE:
        return
    request = request_at(state, r)
    i = request.prefill if request.prefill != NONE else request.decode
    instance_at(state, i).prompt_book -= request.prompt
    _score(state, i)


def close_resident(state: State, r: int) -> None:
    """Request `r` has ended."""
    request = request_at(state, r)
    if state.dispatch == Dispatch.LATE or request.decode == NONE:
        return
    instance_at(state, request.decode).resident_book -= request.prompt + request.output
    _score(state, request.decode)


def _score(state: State, i: int) -> None:
    """What the router's board shows of an instance."""
    inst = instance_at(state, i)
    count = state.num_instances
    tie = inst.turn * RECENCY
    score_at(state, 3 * count + i).value = inst.prompt_book
    if inst.role == PREFILL:
        score_at(state, i).value = inst.prompt_book + tie
        return
    total = inst.prompt_book + inst.resident_book + tie
    score_at(state, count + i).value = total
    if inst.role == MIXED:
        score_at(state, 2 * count + i).value = total
