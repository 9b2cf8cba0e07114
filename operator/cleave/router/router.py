"""Picks the instances for each request and keeps the books. A library: the gateway calls it for
every request, the gRPC service offers it to other gateways.

What is hard: prefill and decode are picked together, from one deployment and revision, and only
between instances whose KV path was tested; within a cell, if they have any, as long as it decodes;
what is left when that fails depends on the fallback.
A prefill instance serves a whole request only as the last resort of `Always`: every engine can, and
a slow answer beats none, but it delays the prompts of all others.
"""

import enum
import itertools
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cleave.policy.best_fit import GAMMA, weigh_context
from cleave.policy.dispatch import (
    CACHED,
    FULLEST,
    HEAVY_OUTPUT_TOKENS,
    LIGHTEST,
    NONE,
    RULES,
    STALE,
    TO_WHOLE,
    close_slots,
    computes_short,
    measure_backlog,
)
from cleave.policy.output_length import ConditionalMean, Predictor
from cleave.router.errors import NoInstance
from cleave.router.instance import Contact, Instance, Ledger, Target
from cleave.router.iteration_time_fit import Passes
from cleave.router.registry import Directory, Model
from cleave.router.score_column import Line
from cleave.router.score_table import Board
from cleave.router.selection import Cached, Chooser, Wish, find_slots
from cleave.router.unavailable_reason import explain

UNKNOWN_OUTPUT_TOKENS = 256
"""Predicted before any answer has been seen."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the planner knows and a router goes by."""

    whole_below_tokens: int = 0
    """Prompts up to so many tokens that are not cached go to a decode instance undivided, while
    every prefill instance has more to do; `policy.short_prompts` finds it; 0: none do."""
    ttft_ms: float = math.inf
    """Targets, which BestFit keeps to."""
    tpot_ms: float = math.inf


_FORGET_EVERY = 4096
"""Requests, until what engines that are gone had cached is forgotten."""

_FIRST_ANSWERS = 1024
_LEARNT_EVERY = 8


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


_PREFILL, _DECODE = Phase.PREFILL, Phase.DECODE
"""Compared for every request, and looking a member up takes an enum as long as a call."""


class Pick:
    """A placed request; entered in the books until released."""

    __slots__ = (
        "_decode_entry",
        "_prefill_entry",
        "decode",
        "decoding_since",
        "output_tokens",
        "prefill",
        "prompt_tokens",
        "reason",
    )

    def __init__(
        self,
        prefill: Instance | None,
        decode: Instance,
        reason: str,
        prompt_tokens: int,
        output_tokens: float,
    ) -> None:
        self.prefill: Target | None = prefill.target if prefill is not None else None
        """None: the decode target does both phases."""
        self.decode: Target = decode.target
        self.reason = reason
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Predicted."""
        self.decoding_since: float | None = None
        """Seconds of the router's clock; None: its prompt is not computed yet."""
        self._prefill_entry: tuple[Instance, Ledger, float] | None = None
        self._decode_entry: tuple[Instance, Ledger, float] | None = None

    @property
    def open(self) -> bool:
        """Whether any of it is still in the books."""
        return self._prefill_entry is not None or self._decode_entry is not None


Placed = tuple[Instance | None, Instance, str]
"""(prefill or None, decode or whole, reason)"""


class Router:
    """Decides over a directory that somebody else keeps up to date."""

    def __init__(
        self,
        directory: Directory,
        fallback: Fallback = Fallback.ALWAYS,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """`seed`: above 0, of policies that draw."""
        self.directory = directory
        self.lengths: Predictor = ConditionalMean(UNKNOWN_OUTPUT_TOKENS)
        """What foretells outputs; whoever sees answers end lets it learn."""
        self._fallback = fallback
        self._rules = rules or Rules()
        self._passes = Passes(self._rules.ttft_ms, self._rules.tpot_ms)
        self._clock = clock
        self._chooser = Chooser(
            directory.policy, self._passes, clock, seed or random.randrange(1, 2147483647)
        )
        rule = RULES[directory.policy]
        self.reads_text = rule.prefill == CACHED
        """Whether picks look at the prompt's text."""
        # What these two compare would cost all others a few percent of a request.
        self._looks_closely = rule.decode in (LIGHTEST, FULLEST)
        self._learns_passes = rule.decode == FULLEST
        self._turn = self._num_answers = 0
        books = directory.books
        self._next_turn = books.next_turn if books is not None else itertools.count(1).__next__

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
        session: bytes | None = None,
        text: bytes | memoryview = b"",
        cached: Cached | None = None,
    ) -> Pick:
        """Place one request and enter it in the books.

        `prompt_tokens` is an estimate, `output_tokens` its limit, 0: none. `single`: it cannot be
        split. `avoid`: instances that it was lost on; `doubt`: those that refused it, taken only
        before giving up on their role. `prefill_lost`: a prefill attempt of it was lost. `session`:
        requests with the same one stay together where that costs little. `text`: of the prompt, for
        policies that know what is cached. `cached`: computed there before. Raises RouterError.
        """
        known = self.directory.models.get(model)
        if known is None:
            raise self.directory.miss(model)
        avoids = [{*avoid, *doubt}, avoid] if doubt else [avoid]
        predicted = self.lengths.predict(prompt_tokens, output_tokens)
        wish = self._chooser.make_wish(prompt_tokens, predicted, session, text, known, cached)
        prefill, decode, reason = self._place(model, known, wish, single, avoids, prefill_lost)
        picked = Pick(prefill, decode, reason, prompt_tokens, predicted)
        self._enter(picked, prefill, decode, wish)
        return picked

    def release(self, pick: Pick, phase: Phase = Phase.WHOLE) -> None:
        """Close the books of a request or of one phase; doing so again changes nothing."""
        entry = pick._prefill_entry
        if entry is not None and phase is not _DECODE:
            pick._prefill_entry = None
            now = pick.decoding_since = self._clock()
            instance, ledger, tokens = entry
            ledger.prompt.close(tokens)
            ledger.prompts -= 1
            if phase is _PREFILL:
                ms = ledger.queue.answer(tokens, now * 1000, ledger.prompt.others)
                if self._learns_passes:
                    self._passes.add_prompt(tokens, ms)
            if pick.prefill is not None:
                ledger.requests -= 1
            # Where both phases end on one instance it is scored once, below.
            if pick.prefill is not None or phase is _PREFILL or pick._decode_entry is None:
                self._refresh(instance, ledger)
        entry = pick._decode_entry
        if entry is not None and phase is not _PREFILL:
            pick._decode_entry = None
            instance, ledger, tokens = entry
            ledger.resident.close(tokens)
            ledger.requests -= 1
            if self._looks_closely:
                self._leave(pick, ledger)
            self._refresh(instance, ledger)

    def learn(self, pick: Pick, output_tokens: int) -> None:
        """A request that is still in the books has ended by itself with that many tokens."""
        self._num_answers += 1
        # Lengths change slowly: once they are known, some of the answers tell enough.
        if self._num_answers < _FIRST_ANSWERS or self._num_answers % _LEARNT_EVERY == 0:
            self.lengths.learn(pick.prompt_tokens, output_tokens)
        entry = pick._decode_entry
        if self._learns_passes and entry is not None and pick.decoding_since is not None:
            _, ledger, _ = entry
            ms = (self._clock() - pick.decoding_since) * 1000
            self._passes.add_answer(output_tokens, ms, len(ledger.running), ledger.context)

    def allows_whole(self, prefill_lost: bool) -> bool:
        """Whether the fallback lets a splittable request run whole on a decode instance."""
        if self._fallback is Fallback.ON_PREFILL_LOSS:
            return prefill_lost
        return self._fallback is Fallback.ALWAYS

    def find_obstacle(self, model: str) -> str:
        """Why a plain request for this model could not be placed now; empty when it could."""
        known = self.directory.models.get(model)
        if known is None:
            return str(self.directory.miss(model))
        try:
            wish = Wish(1, 1.0)
            if self._place_pair(known, wish, [()]) is None:
                self._place_whole(model, known, wish, False, [()], False)
        except NoInstance as error:
            return str(error)
        return ""

    def _place(
        self,
        model: str,
        known: Model,
        wish: Wish,
        single: bool,
        avoids: list[Collection[str]],
        prefill_lost: bool,
    ) -> Placed:
        placed = None
        if not single:
            if self._rules.whole_below_tokens:
                placed = self._place_short(known, wish, avoids)
            placed = placed or self._place_pair(known, wish, avoids)
        return placed or self._place_whole(model, known, wish, single, avoids, prefill_lost)

    def _place_short(
        self, known: Model, wish: Wish, avoids: list[Collection[str]]
    ) -> Placed | None:
        """A prompt so short, or cached so far, that it need not wait for a prefill instance."""
        limit = self._rules.whole_below_tokens
        if wish.prompt_tokens > limit and not wish.hashes:
            return None
        found = self._find_whole(known, "whole", wish, avoids[:1])
        if found is None or found.contact is Contact.STALE:
            return None
        todo = wish.prompt_tokens - self._chooser.count_cached(found, wish)
        queues = [
            board.pending_prompt.find(slot)
            for board in known.boards
            if (slot := board.prefill.find_least()) != NONE
        ]
        queue = min(queues, default=math.inf)
        if not computes_short(todo, found.ledger.prompt.pending, queue, limit):
            return None
        return None, found, "short-prompt"

    def _place_pair(self, known: Model, wish: Wish, avoids: list[Collection[str]]) -> Placed | None:
        """A split, or a mixed instance, with the first of `avoids` that leaves any."""
        for avoid in avoids:
            placed = self._place_pair_without(known, wish, avoid)
            if placed is not None:
                return placed
        return None

    def _place_pair_without(
        self, known: Model, wish: Wish, avoid: Collection[str]
    ) -> Placed | None:
        """On the board that has the least to do in both phases, where none is in doubt if any.

        Boards of one model are revisions side by side during a roll-out. Counting both phases gives
        each about what its scarcer phase can carry, and equal ones take turns.
        """
        best: tuple[float, Board, int, int] | None = None
        for board in known.boards:
            closed = find_slots(board, avoid) if avoid else []
            first, second = self._chooser.choose_pair(board, closed, wish)
            if second == NONE:
                continue
            if len(known.boards) == 1:
                best = 0.0, board, first, second
                break
            ahead = second if first == NONE else first
            todo = measure_backlog(
                board.pending_prompt.find(ahead),
                board.instances[second].ledger.resident.pending,
                board.instances[ahead].ledger.last_turn,
            )
            if first != NONE and board.decode.find(second) >= STALE:
                todo += STALE
            if best is None or todo < best[0]:
                best = todo, board, first, second
        if best is None:
            return None
        _, board, first, second = best
        if first == NONE:
            return None, board.instances[second], "mixed"
        cells = board.cells
        crosses = cells is not None and cells[first] != cells[second]
        reason = "cross-cell" if crosses else "disaggregated"
        return board.instances[first], board.instances[second], reason

    def _place_whole(
        self,
        model: str,
        known: Model,
        wish: Wish,
        single: bool,
        avoids: list[Collection[str]],
        prefill_lost: bool,
    ) -> Placed:
        if single or self.allows_whole(prefill_lost):
            found = self._find_whole(known, "whole", wish, avoids)
            if found is not None:
                return None, found, "single-instance" if single else "no-prefill"
        if self._fallback is Fallback.ALWAYS:
            found = self._find_whole(known, "spare", wish, avoids)
            if found is not None:
                return None, found, "no-decode"
        raise NoInstance(explain(model, known, single, avoids[-1]))

    def _find_whole(
        self, known: Model, use: str, wish: Wish, avoids: list[Collection[str]]
    ) -> Instance | None:
        """The best one for this use, with the first of `avoids` that leaves any."""
        for avoid in avoids:
            best: tuple[float, Instance] | None = None
            for board in known.boards:
                line: Line = getattr(board, use)
                closed, scores = find_slots(board, avoid), line.to_array()
                if closed:
                    scores = close_slots(scores, closed)
                slot = self._chooser.find_slot(board, scores, TO_WHOLE, wish)
                if slot != NONE and (best is None or scores[slot] < best[0]):
                    best = float(scores[slot]), board.instances[slot]
            if best is not None:
                return best[1]
        return None

    def _enter(self, pick: Pick, prefill: Instance | None, decode: Instance, wish: Wish) -> None:
        self._turn = self._next_turn()
        first = decode if prefill is None else prefill
        first.ledger.last_turn = decode.ledger.last_turn = self._turn
        todo = wish.prompt_tokens
        if wish.hashes or wish.cached is not None:
            todo = max(todo - self._chooser.count_cached(first, wish), 0)
            self._chooser.note_prompt(first, decode, wish)
            if self._turn % _FORGET_EVERY == 0:
                instances = self.directory.instances.values()
                self._chooser.forget_others({each.target.boot_id for each in instances})
        ahead = first.ledger
        if ahead.prompt.pending < 1.0:
            ahead.queue.since_ms = self._clock() * 1000
        ahead.prompt.enter(todo)
        ahead.prompts += 1
        pick._prefill_entry = (first, ahead, todo)
        resident = pick.prompt_tokens + pick.output_tokens
        ledger = decode.ledger
        ledger.resident.enter(resident)
        ledger.requests += 1
        if self._looks_closely:
            ledger.running[pick] = None
            ledger.context += weigh_context(pick.prompt_tokens, pick.output_tokens, GAMMA)
            if pick.output_tokens > HEAVY_OUTPUT_TOKENS:
                ledger.heavy += 1
        pick._decode_entry = (decode, ledger, resident)
        self.directory.refresh(decode)
        if prefill is not None:
            prefill.ledger.requests += 1
            self.directory.refresh(prefill)

    def _leave(self, pick: Pick, ledger: Ledger) -> None:
        del ledger.running[pick]
        ledger.context -= weigh_context(pick.prompt_tokens, pick.output_tokens, GAMMA)
        if pick.output_tokens > HEAVY_OUTPUT_TOKENS:
            ledger.heavy -= 1

    def _refresh(self, instance: Instance, ledger: Ledger) -> None:
        if instance.ledger is ledger:
            self.directory.refresh(instance)
