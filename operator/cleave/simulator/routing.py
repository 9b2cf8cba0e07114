"""Which instances take a request, with the router's own books and decisions. Compiled.

What is hard: the router counts a request from the moment it is placed, not from the moment it is
computed, so the books are kept here as `cleave.router` keeps them: prompt tokens until the prompt
is answered, prompt and output tokens of what decodes until it ends.
"""

from cleave.policy.dispatch import RECENCY, choose_pair
from cleave.simulator.fleet import Dispatch
from cleave.simulator.layout import DECODE, MIXED, NONE, PREFILL, State
from cleave.simulator.memory import fits
from cleave.simulator.outcome import Fate


def place(state: State, r: int) -> None:
    """Choose the instances of an arriving request and enter it in their books."""
    fleet, request = state.fleet[0], state.requests[r]
    if fleet.dispatch == Dispatch.LATE:
        if not _fits_somewhere(state, r):
            request.fate = Fate.TOO_LONG
        return
    if fleet.dispatch == Dispatch.LEAST_PENDING:
        scores = state.scores
        if not fleet.has_decode:
            first, second = int(scores[0].argmin()), NONE
        elif not fleet.has_prefill:
            first, second = NONE, int(scores[1].argmin())
        else:
            first, second = choose_pair(scores[0], scores[1], scores[2], scores[3])
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
    fleet = state.fleet[0]
    can_prefill = not fleet.has_prefill
    can_decode = not fleet.has_decode
    for i in range(len(state.instances)):
        role = state.instances[i].role
        if fits(state, i, r):
            can_prefill = can_prefill or role != DECODE
            can_decode = can_decode or role != PREFILL
    return can_prefill and can_decode


def _take_turns(state: State) -> tuple[int, int]:
    """Round robin or random over those that take prompts, then over those that decode."""
    fleet = state.fleet[0]
    if not fleet.has_prefill:
        return NONE, _take_turn(state, DECODE)
    first = _take_turn(state, PREFILL)
    if state.instances[first].role == MIXED:
        return NONE, first
    return first, _take_turn(state, DECODE) if fleet.has_decode else NONE


def _take_turn(state: State, role: int) -> int:
    """The next instance of a role; mixed ones have both."""
    fleet, num_instances = state.fleet[0], len(state.instances)
    at = fleet.entry if role == PREFILL else fleet.decoder
    skip = 0
    if fleet.dispatch == Dispatch.RANDOM:
        candidates = 0
        for i in range(num_instances):
            if state.instances[i].role == role or state.instances[i].role == MIXED:
                candidates += 1
        skip = _draw(state, candidates)
        at = 0
    for _ in range(2 * num_instances):
        i = at % num_instances
        at += 1
        if state.instances[i].role == role or state.instances[i].role == MIXED:
            if skip == 0:
                break
            skip -= 1
    if role == PREFILL:
        fleet.entry = at
    else:
        fleet.decoder = at
    return i


def _draw(state: State, count: int) -> int:
    """A number below `count` (Park and Miller's generator)."""
    fleet = state.fleet[0]
    fleet.random = fleet.random * 48271 % 2147483647
    return fleet.random * count // 2147483647


def _enter(state: State, r: int) -> None:
    fleet, request = state.fleet[0], state.requests[r]
    fleet.turn += 1
    first = request.prefill if request.prefill != NONE else request.decode
    if fleet.has_prefill:
        inst = state.instances[first]
        inst.prompt_book += request.prompt
        inst.turn = fleet.turn
        _score(state, first)
    if request.decode != NONE:
        inst = state.instances[request.decode]
        inst.resident_book += request.prompt + request.output
        inst.turn = fleet.turn
        _score(state, request.decode)


def close_prompt(state: State, r: int) -> None:
    """The prompt of request `r` is answered."""
    if state.fleet[0].dispatch == Dispatch.LATE:
        return
    request = state.requests[r]
    i = request.prefill if request.prefill != NONE else request.decode
    state.instances[i].prompt_book -= request.prompt
    _score(state, i)


def close_resident(state: State, r: int) -> None:
    """Request `r` has ended."""
    request = state.requests[r]
    if state.fleet[0].dispatch == Dispatch.LATE or request.decode == NONE:
        return
    state.instances[request.decode].resident_book -= request.prompt + request.output
    _score(state, request.decode)


def _score(state: State, i: int) -> None:
    """What the router's board shows of an instance."""
    inst, scores = state.instances[i], state.scores
    tie = inst.turn * RECENCY
    scores[3, i] = inst.prompt_book
    if inst.role == PREFILL:
        scores[0, i] = inst.prompt_book + tie
        return
    total = inst.prompt_book + inst.resident_book + tie
    scores[1, i] = total
    if inst.role == MIXED:
        scores[2, i] = total
