"""Picks the instances for each request and keeps the books. A library: the gateway calls it for
every request, the gRPC service offers it to other gateways.

What is hard: prefill and decode are picked together, from one deployment and revision, and only
between instances whose KV path was tested; what is left when that fails depends on the fallback.
A prefill instance serves a whole request only as the last resort of `Always`: every engine can, and
a slow answer beats none, but it delays the prompts of all others.
"""

import enum
from collections.abc import Collection

from cleave.policy.dispatch import NONE, Scores, choose_pair, close_slots, find_least
from cleave.router.board import Board
from cleave.router.directory import Directory, Model
from cleave.router.errors import NoInstance, UnknownModel
from cleave.router.instance import Contact, Instance, Ledger, Target
from cleave.rpc.v1 import agent_pb2

UNKNOWN_OUTPUT_TOKENS = 256
"""Booked for a request that states no limit."""

RESIDENT_WEIGHT = 0.1
"""What a token in a decode instance weighs beside one that waits for prefill, between revisions.

The latter is computed; the former is read once for each token that the newcomer puts out, some
hundred times for a thousandth of the work. A new revision's empty decode side thus draws requests,
but not so many that its prompts queue.
"""


class Fallback(enum.Enum):
    """When a request that should be split may run whole on a decode instance instead."""

    ALWAYS = "Always"
    """Whenever no prefill instance can be had or the hand-off failed."""
    NEVER = "Never"
    ON_PREFILL_LOSS = "OnPrefillLoss"
    """Only after a prefill attempt of this very request was lost."""


class Phase(enum.Enum):
    """What of a request is over."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class Pick:
    """A placed request; entered in the books until released."""

    __slots__ = ("_decode_entry", "_prefill_entry", "decode", "prefill", "reason")

    def __init__(self, prefill: Instance | None, decode: Instance, reason: str) -> None:
        self.prefill: Target | None = prefill.target if prefill is not None else None
        """None: the decode target does both phases."""
        self.decode: Target = decode.target
        self.reason = reason
        self._prefill_entry: tuple[Instance, Ledger, float] | None = None
        self._decode_entry: tuple[Instance, Ledger, float] | None = None

    @property
    def open(self) -> bool:
        """Whether any of it is still in the books."""
        return self._prefill_entry is not None or self._decode_entry is not None


class Router:
    """Decides over a directory that somebody else keeps up to date."""

    def __init__(self, directory: Directory, fallback: Fallback = Fallback.ALWAYS) -> None:
        self.directory = directory
        self._fallback = fallback
        self._turn = 0

    def pick(
        self,
        model: str,
        prompt_tokens: int,
        output_tokens: int = 0,
        *,
        single: bool = False,
        avoid: Collection[str] = (),
        doubt: Collection[str] = (),
        prefill_lost: bool = False,
    ) -> Pick:
        """Place one request and enter it in the books.

        Tokens are estimates, `output_tokens` 0: unknown. `single`: it cannot be split. `avoid`:
        instances that it was lost on; `doubt`: those that refused it, taken only before giving up
        on their role. `prefill_lost`: a prefill attempt of it was lost.
        Raises UnknownModel and NoInstance.
        """
        known = self.directory.models.get(model)
        if known is None:
            raise UnknownModel(model)
        avoids = [{*avoid, *doubt}, avoid] if doubt else [avoid]
        placed = None if single else _place_pair(known, avoids)
        if placed is None:
            placed = self._place_whole(model, known, single, avoids, prefill_lost)
        prefill, decode, reason = placed
        picked = Pick(prefill, decode, reason)
        self._enter(picked, prefill, decode, prompt_tokens, output_tokens)
        return picked

    def release(self, pick: Pick, phase: Phase = Phase.WHOLE) -> None:
        """Close the books of a request or of one phase; doing so again changes nothing."""
        entry = pick._prefill_entry
        if entry is not None and phase is not Phase.DECODE:
            pick._prefill_entry = None
            instance, ledger, tokens = entry
            ledger.prompt.close(tokens)
            if pick.prefill is not None:
                ledger.requests -= 1
            self._refresh(instance, ledger)
        entry = pick._decode_entry
        if entry is not None and phase is not Phase.PREFILL:
            pick._decode_entry = None
            instance, ledger, tokens = entry
            ledger.resident.close(tokens)
            ledger.requests -= 1
            self._refresh(instance, ledger)

    def allows_whole(self, prefill_lost: bool) -> bool:
        """Whether the fallback lets a splittable request run whole on a decode instance."""
        if self._fallback is Fallback.ON_PREFILL_LOSS:
            return prefill_lost
        return self._fallback is Fallback.ALWAYS

    def find_obstacle(self, model: str) -> str:
        """Why a plain request for this model could not be placed now; empty when it could."""
        known = self.directory.models.get(model)
        if known is None:
            return str(UnknownModel(model))
        try:
            if _place_pair(known, [()]) is None:
                self._place_whole(model, known, False, [()], False)
        except NoInstance as error:
            return str(error)
        return ""

    def _place_whole(
        self,
        model: str,
        known: Model,
        single: bool,
        avoids: list[Collection[str]],
        prefill_lost: bool,
    ) -> tuple[None, Instance, str]:
        if single or self.allows_whole(prefill_lost):
            found = _find_on_boards(known, "whole", avoids)
            if found is not None:
                return None, found, "single-instance" if single else "no-prefill"
        if self._fallback is Fallback.ALWAYS:
            found = _find_on_boards(known, "spare", avoids)
            if found is not None:
                return None, found, "no-decode"
        raise NoInstance(_explain(model, known, single, avoids[-1]))

    def _enter(
        self,
        pick: Pick,
        prefill: Instance | None,
        decode: Instance,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        self._turn += 1
        first = decode if prefill is None else prefill
        first.last_turn = decode.last_turn = self._turn
        first.ledger.prompt.enter(prompt_tokens)
        pick._prefill_entry = (first, first.ledger, prompt_tokens)
        resident = prompt_tokens + (output_tokens or UNKNOWN_OUTPUT_TOKENS)
        decode.ledger.resident.enter(resident)
        decode.ledger.requests += 1
        pick._decode_entry = (decode, decode.ledger, resident)
        self.directory.refresh(decode)
        if prefill is not None:
            prefill.ledger.requests += 1
            self.directory.refresh(prefill)

    def _refresh(self, instance: Instance, ledger: Ledger) -> None:
        if instance.ledger is ledger:
            self.directory.refresh(instance)


def _place_pair(
    known: Model, avoids: list[Collection[str]]
) -> tuple[Instance | None, Instance, str] | None:
    """A split, or a mixed instance, with the first of `avoids` that leaves any."""
    for avoid in avoids:
        placed = _place_pair_without(known, avoid)
        if placed is not None:
            return placed
    return None


def _place_pair_without(
    known: Model, avoid: Collection[str]
) -> tuple[Instance | None, Instance, str] | None:
    """On the board whose pair has the least to do in both phases together.

    Boards of one model are revisions side by side during a roll-out. Counting both phases gives
    each about what its scarcer phase can carry, and equal ones take turns.
    """
    best: tuple[float, Board, int, int] | None = None
    for board in known.boards:
        closed = _find_slots(board, avoid)
        prefill, decode, mixed = board.prefill, board.decode, board.mixed
        if closed:
            prefill, decode, mixed = (close_slots(s, closed) for s in (prefill, decode, mixed))
        first, second = choose_pair(prefill, decode, mixed, board.pending_prompt)
        if second == NONE:
            continue
        prompt = board.pending_prompt[second] if first == NONE else prefill[first]
        pending = prompt + RESIDENT_WEIGHT * (mixed if first == NONE else decode)[second]
        if best is None or pending < best[0]:
            best = float(pending), board, first, second
    if best is None:
        return None
    _, board, first, second = best
    if first == NONE:
        return None, board.instances[second], "mixed"
    return board.instances[first], board.instances[second], "disaggregated"


def _find_on_boards(known: Model, use: str, avoids: list[Collection[str]]) -> Instance | None:
    """The least pending one for this use, with the first of `avoids` that leaves any."""
    for avoid in avoids:
        found = _find_without(known, use, avoid)
        if found is not None:
            return found
    return None


def _find_without(known: Model, use: str, avoid: Collection[str]) -> Instance | None:
    best: tuple[float, Instance] | None = None
    for board in known.boards:
        scores: Scores = getattr(board, use)
        closed = _find_slots(board, avoid)
        if closed:
            scores = close_slots(scores, closed)
        slot = find_least(scores)
        if slot != NONE and (best is None or scores[slot] < best[0]):
            best = float(scores[slot]), board.instances[slot]
    return best[1] if best is not None else None


def _find_slots(board: Board, names: Collection[str]) -> list[int]:
    return [s for s, i in enumerate(board.instances) if i.name in names] if names else []


def _explain(model: str, known: Model, single: bool, avoid: Collection[str]) -> str:
    """One sentence that says which instances there are and why none of them will do."""
    parts: list[str] = []
    for instance in known.instances:
        stated = instance.registration
        state = agent_pb2.State.Name(stated.state).removeprefix("STATE_").lower()
        if instance.contact in (Contact.SILENT, Contact.LOST):
            state = instance.contact.value
        elif instance.name in avoid:
            state = "failed this request"
        elif instance.selectable and not stated.kv_path.verified:
            state = "KV path not verified"
        role = agent_pb2.Role.Name(stated.role).removeprefix("ROLE_").lower()
        parts.append(f"{instance.name} ({role}): {state}")
    kind = "a whole request" if single else "a request"
    listed = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    return f"no instance of {model!r} can take {kind} now: {listed}"
