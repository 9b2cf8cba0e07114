"""Chooses slots of one board by the deployment's policy. Used by the router for every request.

What is hard: the usual policies are one argmin over scores that the board keeps, and must stay as
cheap as that; the others look at the request as well. Whatever a policy finds, a closed instance is
never among it, and one in doubt only when all are.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from cleave.policy.affinity import find_kept, to_key
from cleave.policy.dispatch import (
    NONE,
    STALE,
    Cells,
    Policy,
    Scores,
    close_slots,
    find_at_home,
    find_least,
    find_lightest,
    find_sampled,
    serves_whole,
    stay_in_cell,
    weigh_cells,
)
from cleave.policy.lengths import find_left
from cleave.policy.packing import (
    Packing,
    find_norm,
    find_peak_after,
    find_saved_ms,
    find_spare_context,
    find_spare_prompt,
    weigh_context,
)
from cleave.policy.prefixes import TOKENS_PER_BLOCK, PrefixIndex, find_cached, hash_blocks
from cleave.router.board import BY_SCORE, Board
from cleave.router.boards import RESIDENT_WEIGHT
from cleave.router.directory import Model
from cleave.router.instance import Instance
from cleave.router.passes import Passes

ADAPTER_TOKENS = 2_048.0
"""How many more tokens may wait, or be held, where an adapter is than elsewhere: about what it
takes to bring one to another instance."""


_INF = math.inf


class Cached(NamedTuple):
    """Where a prompt was computed that has to be computed again."""

    boot_id: str
    tokens: int


class Wish:
    """What is known of a request that is to be placed."""

    __slots__ = ("adapter", "cached", "hashes", "output_tokens", "prompt_tokens", "session")

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: float,
        hashes: Sequence[int] = (),
        session: int | None = None,
        adapter: int | None = None,
        cached: Cached | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Predicted."""
        self.hashes = hashes
        """Of its prompt's blocks, for PrefixAware."""
        self.session = session
        """Key of the session it belongs to."""
        self.adapter = adapter
        """Key of the adapter that it keeps to an instance with."""
        self.cached = cached


class Chooser:
    """One policy and what it remembers."""

    def __init__(
        self,
        policy: Policy,
        passes: Passes,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        """`clock`: seconds; `seed`: above 0, for policies that draw."""
        self._policy = policy
        self._is_by_score = policy in BY_SCORE
        self._passes = passes
        self._clock = clock
        self._seed = seed
        self._index = PrefixIndex()

    def make_wish(
        self,
        prompt_tokens: int,
        output_tokens: float,
        session: bytes | None,
        text: bytes | memoryview,
        known: Model,
        cached: Cached | None,
    ) -> Wish:
        """What this policy looks at, and nothing that it does not."""
        adapter = known.adapter
        if self._is_by_score and session is None and adapter is None and cached is None:
            return Wish(prompt_tokens, output_tokens)
        key = to_key(session) if session is not None else None
        # KV that one adapter made is no other's.
        hashes = hash_blocks(text, adapter or 0) if self._policy is Policy.PREFIX_AWARE else ()
        keeps = known.is_crowded and self._policy in _KEEPING_ADAPTERS
        return Wish(prompt_tokens, output_tokens, hashes, key, adapter if keeps else None, cached)

    def count_cached(self, instance: Instance, wish: Wish) -> int:
        """Tokens of the prompt that the instance has probably computed before."""
        boot = instance.target.boot_id
        if wish.cached is not None and wish.cached.boot_id == boot:
            return min(wish.cached.tokens, wish.prompt_tokens)
        for count, holders in self._index.find(wish.hashes):
            if boot in holders:
                return min(count * TOKENS_PER_BLOCK, wish.prompt_tokens)
        return 0

    def note_prompt(self, first: Instance, second: Instance, wish: Wish) -> None:
        """Both instances of a request will have its prompt's KV."""
        for instance in {first.name: first, second.name: second}.values():
            stated = instance.registration
            tokens = stated.kv_blocks_total * stated.kv_block_size
            self._index.add(stated.boot_id, wish.hashes, tokens // TOKENS_PER_BLOCK)

    def forget_others(self, boots: Collection[str]) -> None:
        """Drop what is known of engines that are gone."""
        self._index.keep(boots)

    def choose_pair(self, board: Board, closed: list[int], wish: Wish) -> tuple[int, int]:
        """(prefill slot, decode slot), or (NONE, slot): both phases there; none of `closed`."""
        cells = board.cells
        plain = wish.session is None and wish.adapter is None and wish.cached is None
        if self._is_by_score and plain and not closed and not board.is_shared and cells is None:
            # `policy.dispatch.choose_pair` over lines.
            first = board.prefill.find_least() if board.prefill.size else NONE
            second = board.decode.find_least() if first != NONE else NONE
            whole = board.mixed.find_least() if board.mixed.size else NONE
            return _settle(board, first, second, whole)
        prefill, decode, mixed = (
            close_slots(line.to_array(), closed) if closed else line.to_array()
            for line in (board.prefill, board.decode, board.mixed)
        )
        if cells is not None and prefill.size and decode.size:
            prefill = self._weigh_cells(board, cells, prefill, decode, wish)
        first = self.find_for_prompt(board, prefill, wish)
        if cells is not None and first != NONE and decode.size:
            decode = stay_in_cell(decode, cells, first)
        second = self.find_for_whole(board, decode, wish, False) if first != NONE else NONE
        whole = self.find_for_whole(board, mixed, wish, True)
        return _settle(board, first, second, whole)

    def find_for_prompt(self, board: Board, scores: Scores, wish: Wish) -> int:
        """Who computes a prompt that somebody else decodes."""
        slot = self._find_for_new(board, scores, wish)
        if wish.cached is None or slot == NONE:
            return slot
        # As `find_kept` weighs it: it may wait for as many tokens as need not be computed there.
        home = board.boots.get(wish.cached.boot_id, NONE)
        if home == NONE or scores[home] == _INF:
            return slot
        queues = board.pending_prompt
        return home if queues.find(home) <= queues.find(slot) + wish.cached.tokens else slot

    def _find_for_new(self, board: Board, scores: Scores, wish: Wish) -> int:
        if not scores.size:
            return NONE
        if wish.session is not None:
            return self._find_kept(board, scores, wish.session, wish.prompt_tokens)
        if wish.adapter is not None and not self._index.knows(wish.hashes):
            return self._find_kept(board, scores, wish.adapter, ADAPTER_TOKENS)
        if self._policy is Policy.PREFIX_AWARE:
            return self._find_cached(board, scores, wish)
        if self._policy in _DRAWN:
            return self._draw(scores)
        if board.is_shared and self._policy is Policy.SHORTEST_WAIT:
            queue = board.instances[find_least(scores)].ledger.queue
            worth_ms = queue.predict_ms(wish.prompt_tokens, 1.0)
            return find_at_home(scores, board.away, worth_ms, self._clock() * 1000)
        return self._find_least(board, scores, wish.prompt_tokens)

    def find_for_whole(self, board: Board, scores: Scores, wish: Wish, prompt: bool) -> int:
        """Who decodes; with `prompt`: who does both phases."""
        if not scores.size:
            return NONE
        if prompt and wish.session is not None:
            return self._find_kept(board, scores, wish.session, wish.prompt_tokens)
        if wish.adapter is not None and not (prompt and self._index.knows(wish.hashes)):
            return find_kept(scores, board.keys, wish.adapter, ADAPTER_TOKENS)
        policy = self._policy
        if policy is Policy.BEST_FIT:
            return self._find_best_fit(board, scores, wish, prompt)
        if policy is Policy.LEAST_HEAVY:
            need = wish.prompt_tokens + wish.output_tokens
            slot, self._seed = find_lightest(scores, board.room, board.heaviness, need, self._seed)
            return slot
        if policy is Policy.PREFIX_AWARE and prompt:
            return self._find_cached(board, scores, wish)
        if policy in _DRAWN:
            return self._draw(scores)
        return self._find_least(board, scores, wish.prompt_tokens + wish.output_tokens)

    def _weigh_cells(
        self, board: Board, cells: Cells, prefill: Scores, decode: Scores, wish: Wish
    ) -> Scores:
        """Leaving a cell counts as much as computing the prompt, or as one turn or request."""
        crossing = float(wish.prompt_tokens) if self._policy not in _IN_TURNS else 1.0
        unit = 1.0
        if self._policy is Policy.SHORTEST_WAIT:
            unit = board.instances[find_least(prefill)].ledger.queue.token_ms
            # What is idle scores nothing: counted from now, all have to wait for what is added.
            prefill = np.maximum(prefill, self._clock() * 1000)
        return weigh_cells(prefill, decode, cells, RESIDENT_WEIGHT * unit, crossing * unit)

    def _find_least(self, board: Board, scores: Scores, worth: float) -> int:
        if board.is_shared and self._policy in _IN_TOKENS:
            return find_at_home(scores, board.away, worth, 0.0)
        return find_least(scores)

    def _find_kept(self, board: Board, scores: Scores, session: int, tokens: float) -> int:
        """Whatever the policy counts: what coming back costs is the queue of prompts."""
        queues = np.where(scores < np.inf, board.pending_prompt.to_array(), scores)
        return find_kept(queues, board.keys, session, tokens)

    def _find_cached(self, board: Board, scores: Scores, wish: Wish) -> int:
        found = self._index.find(wish.hashes)
        return find_cached(scores, board.find_boot, board.boots, found)

    def _draw(self, scores: Scores) -> int:
        size = 1 if self._policy is Policy.RANDOM else 2
        slot, self._seed = find_sampled(scores, size, self._seed)
        return slot

    def _find_best_fit(self, board: Board, scores: Scores, wish: Wish, prompt: bool) -> int:
        """The fullest that keeps constraints (b) to (e); none: the least pending of all."""
        packing = self._passes.packing
        if packing is None:
            return self._find_least(board, scores, wish.prompt_tokens + wish.output_tokens)
        fit = packing.coefficients
        context, batch = board.context, board.batch
        need = weigh_context(wish.prompt_tokens, wish.output_tokens, packing.gamma)
        spare = find_spare_context(
            batch, context, fit.k2, fit.c2, fit.c3, packing.tpot_ms, packing.theta
        )
        fits = (scores < STALE) & (spare >= need)
        if prompt:
            pending = board.pending_prompt.to_array()
            fits &= find_spare_prompt(pending, fit.k1, fit.c1, packing.ttft_ms) >= (
                wish.prompt_tokens
            )
        candidates = np.flatnonzero(fits)
        norms = find_norm(batch[candidates], context[candidates], fit.k2, fit.c2)
        for at in np.argsort(-norms, kind="stable"):
            slot = int(candidates[at])
            if self._keeps_running(board.instances[slot], wish, prompt, packing):
                return slot
        return find_least(scores)

    def _keeps_running(
        self, instance: Instance, wish: Wish, prompt: bool, packing: Packing
    ) -> bool:
        """(d) and (e): what runs there keeps its TPOT, and its KV fits until all have ended."""
        fit, now = packing.coefficients, self._clock()
        running = instance.ledger.running
        context = instance.ledger.context
        step_ms = max(fit.decode_ms(len(running), context), 1e-3)
        held = np.empty(len(running) + 1)
        left = np.empty(len(running) + 1)
        saved_ms = np.inf
        for at, entry in enumerate(running):
            made = 0.0
            if entry.decoding_since is not None:
                decoding_ms = (now - entry.decoding_since) * 1000
                made = decoding_ms / step_ms
                spare_ms = find_saved_ms(made + 1, decoding_ms, packing.tpot_ms, packing.theta)
                saved_ms = min(saved_ms, spare_ms)
            held[at] = entry.prompt_tokens + made
            left[at] = find_left(entry.output_tokens, made)
        if prompt and saved_ms < np.inf:
            pending = instance.ledger.prompt.pending
            if find_spare_prompt(pending, fit.k1, fit.c1, saved_ms) < wish.prompt_tokens:
                return False
        held[-1], left[-1] = wish.prompt_tokens, wish.output_tokens
        stated = instance.registration
        capacity = stated.kv_blocks_total * stated.kv_block_size
        return find_peak_after(held, left) <= packing.theta * capacity


def _settle(board: Board, first: int, second: int, whole: int) -> tuple[int, int]:
    """A split over `first` and `second`, or a mixed instance; NONE: there is none."""
    if first == NONE or second == NONE or whole == NONE:
        return (first, second) if second != NONE else (NONE, whole)
    queues = board.pending_prompt
    if serves_whole(queues.find(first), board.decode.find(second), queues.find(whole)):
        return NONE, whole
    return first, second


_IN_TURNS = (Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS)
_KEEPING_ADAPTERS = (
    Policy.SHORTEST_WAIT,
    Policy.PENDING_TOKENS,
    Policy.POWER_OF_TWO,
    Policy.PREFIX_AWARE,
)
"""The others look at something that staying with an adapter would spoil."""
_IN_TOKENS = (Policy.SHORTEST_WAIT, Policy.PENDING_TOKENS)
_DRAWN = (Policy.RANDOM, Policy.POWER_OF_TWO)
