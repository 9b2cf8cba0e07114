"""Supplies the scores of one board to `policy`, which picks the slots. Used by the router for every
request.

What is hard: the usual policies take the least of scores that the board keeps, and must stay as
cheap as that; the others look at the request as well. A closed instance is never picked, and one
in doubt only when all are.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from cleave.api.enums import DispatchPolicy
from cleave.policy.best_fit import (
    BestFitModel,
    compute_context_weight,
    compute_saved_ms,
    find_best_fit,
    keeps_running,
    measure_fullness,
)
from cleave.policy.dispatch import (
    BY_REQUESTS,
    BY_TURN,
    BY_WAIT,
    CACHED,
    FULLEST,
    NONE,
    RESIDENT_WEIGHT,
    RULES,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    CellNumbers,
    Scores,
    add_cell_costs,
    choose_least_pair,
    close_slots,
    find_least,
    find_slot,
    is_by_score,
    prefer_own,
    restrict_to_cell,
    select_pair,
)
from cleave.policy.output_length import guess_progress
from cleave.policy.prefix_cache import (
    TOKENS_PER_BLOCK,
    PrefixIndex,
    find_least_uncached,
    hash_blocks,
)
from cleave.policy.session_affinity import find_attached, goes_back, to_key
from cleave.router.instance import RoutedInstance
from cleave.router.iteration_time_fit import IterationTimeEstimator
from cleave.router.registry import ServedModel
from cleave.router.score_table import ScoreTable

_INF = math.inf


class CachedPrompt(NamedTuple):
    """Where a prompt was computed that has to be computed again."""

    boot_id: str
    tokens: int


class RoutingRequest:
    """What is known of a request that is to be placed."""

    __slots__ = ("adapter", "cached", "hashes", "output_tokens", "prompt_tokens", "session")

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: float,
        hashes: Sequence[int] = (),
        session: int | None = None,
        adapter: int | None = None,
        cached: CachedPrompt | None = None,
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


class EndpointSelector:
    """One policy and what it remembers: the seed of its draws, and which prompts are cached."""

    def __init__(
        self,
        policy: DispatchPolicy,
        passes: IterationTimeEstimator,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        """`clock`: seconds; `seed`: above 0, for policies that draw."""
        rule = RULES[policy]
        self._is_by_score = is_by_score(rule)
        self._counts = rule.counts
        self._picks = rule.prefill, rule.decode
        self._keeps_adapters = rule.keeps_adapters
        self._prefers_own = rule.prefers_own
        self._is_by_text = rule.prefill == CACHED
        self._iteration_times = passes
        self._clock = clock
        self._seed = seed
        self._prefix_index = PrefixIndex()

    def build_request(
        self,
        prompt_tokens: int,
        output_tokens: float,
        session: bytes | None,
        text: bytes | memoryview,
        known: ServedModel,
        cached: CachedPrompt | None,
    ) -> RoutingRequest:
        """What this policy looks at, and nothing that it does not."""
        adapter = known.adapter
        if self._is_by_score and session is None and adapter is None and cached is None:
            return RoutingRequest(prompt_tokens, output_tokens)
        key = to_key(session) if session is not None else None
        # KV that one adapter made is no other's.
        hashes = hash_blocks(text, adapter or 0) if self._is_by_text else ()
        keeps = known.is_crowded and self._keeps_adapters
        return RoutingRequest(
            prompt_tokens, output_tokens, hashes, key, adapter if keeps else None, cached
        )

    def count_cached(self, instance: RoutedInstance, wish: RoutingRequest) -> int:
        """Tokens of the prompt that the instance has probably computed before."""
        boot = instance.target.boot_id
        if wish.cached is not None and wish.cached.boot_id == boot:
            return min(wish.cached.tokens, wish.prompt_tokens)
        for count, holders in self._prefix_index.find(wish.hashes):
            if boot in holders:
                return min(count * TOKENS_PER_BLOCK, wish.prompt_tokens)
        return 0

    def record_prompt(
        self, first: RoutedInstance, second: RoutedInstance, wish: RoutingRequest
    ) -> None:
        """Both instances of a request will have its prompt's KV."""
        for instance in {first.name: first, second.name: second}.values():
            stated = instance.registration
            tokens = stated.kv_blocks_total * stated.kv_block_size
            self._prefix_index.add(stated.boot_id, wish.hashes, tokens // TOKENS_PER_BLOCK)

    def retain_boots(self, boots: Collection[str]) -> None:
        """Drop what is known of engines that are gone."""
        self._prefix_index.retain(boots)

    def select_pair(
        self, board: ScoreTable, closed: list[int], wish: RoutingRequest
    ) -> tuple[int, int]:
        """(prefill slot, decode slot), or (NONE, slot): both phases there; none of `closed`."""
        plain = wish.session is None and wish.adapter is None and wish.cached is None
        if (
            self._is_by_score
            and plain
            and not closed
            and not board.is_shared
            and board.cells is None
        ):
            return choose_least_pair(board.prefill, board.decode, board.mixed, board.pending_prompt)

        def find(purpose: int, wish: RoutingRequest, first: int) -> int:
            scores = _read_scores(board, purpose, closed)
            if not scores.size:
                return NONE
            cells = board.cells
            if cells is not None and purpose == TO_PREFILL and board.decode.size:
                decode = _read_scores(board, TO_DECODE, closed)
                scores = self._add_cell_costs(board, cells, scores, decode, wish)
            elif cells is not None and purpose == TO_DECODE:
                scores = restrict_to_cell(scores, cells, first)
            return self.find_slot(board, scores, purpose, wish)

        return select_pair(find, wish, board.decode, board.pending_prompt)

    def find_slot(
        self, board: ScoreTable, scores: Scores, purpose: int, wish: RoutingRequest
    ) -> int:
        """The slot that takes the request's prompt, its decoding or both."""
        if not scores.size:
            return NONE
        slot = self._find_by_rule(board, scores, purpose, wish)
        if purpose != TO_PREFILL or wish.cached is None or slot == NONE:
            return slot
        home = board.slot_by_boot.get(wish.cached.boot_id, NONE)
        if home == NONE or scores[home] == _INF:
            return slot
        queues = board.pending_prompt
        return (
            home
            if goes_back(queues.get_score(home), queues.get_score(slot), wish.cached.tokens)
            else slot
        )

    def _find_by_rule(
        self, board: ScoreTable, scores: Scores, purpose: int, wish: RoutingRequest
    ) -> int:
        """Where a session or an adapter keeps the request, else what the policy's rule picks."""
        session, adapter = wish.session, wish.adapter
        if (
            adapter is not None
            and purpose != TO_DECODE
            and self._prefix_index.contains(wish.hashes)
        ):
            adapter = None
        if adapter is not None or (session is not None and purpose != TO_DECODE):
            queues = board.pending_prompt.to_array()
            tokens = wish.prompt_tokens
            return find_attached(scores, queues, board.keys, purpose, session, adapter, tokens)
        prefill, decode = self._picks
        if prefill == CACHED and purpose != TO_DECODE:
            return find_least_uncached(
                scores, board.find_boot, board.slot_by_boot, self._prefix_index.find(wish.hashes)
            )
        pick = prefill if purpose == TO_PREFILL else decode
        if pick == FULLEST:
            slot = self._find_best_fit(board, scores, purpose == TO_WHOLE, wish)
            if slot != NONE:
                return slot
        if board.is_shared and self._prefers_own:
            return self._find_own(board, scores, purpose, wish)
        need = wish.prompt_tokens + wish.output_tokens
        slot, self._seed = find_slot(pick, scores, board.room, board.heaviness, need, self._seed)
        return slot

    def _find_own(
        self, board: ScoreTable, scores: Scores, purpose: int, wish: RoutingRequest
    ) -> int:
        """The least of the router's own share, unless another is less by what the request adds."""
        worth = wish.prompt_tokens + (wish.output_tokens if purpose != TO_PREFILL else 0.0)
        if purpose != TO_PREFILL or self._counts != BY_WAIT:
            return prefer_own(scores, board.is_remote, worth, 0.0)
        queue = board.instances[find_least(scores)].in_flight.queue
        worth_ms = queue.predict_ms(wish.prompt_tokens, 1.0)
        return prefer_own(scores, board.is_remote, worth_ms, self._clock() * 1000)

    def _add_cell_costs(
        self,
        board: ScoreTable,
        cells: CellNumbers,
        prefill: Scores,
        decode: Scores,
        wish: RoutingRequest,
    ) -> Scores:
        """Leaving a cell counts as much as computing the prompt, or as one turn or request."""
        crossing = 1.0 if self._counts in (BY_TURN, BY_REQUESTS) else float(wish.prompt_tokens)
        unit = 1.0
        if self._counts == BY_WAIT:
            unit = board.instances[find_least(prefill)].in_flight.queue.token_ms
            # What is idle scores nothing: counted from now, all have to wait for what is added.
            prefill = np.maximum(prefill, self._clock() * 1000)
        return add_cell_costs(prefill, decode, cells, RESIDENT_WEIGHT * unit, crossing * unit)

    def _find_best_fit(
        self, board: ScoreTable, scores: Scores, prefills: bool, wish: RoutingRequest
    ) -> int:
        """`policy.best_fit.find_best_fit`; NONE also until the passes are known."""
        packing = self._iteration_times.best_fit
        if packing is None:
            return NONE
        fullness = measure_fullness(
            scores,
            board.batch,
            board.context,
            board.pending_prompt.to_array(),
            wish.prompt_tokens,
            compute_context_weight(wish.prompt_tokens, wish.output_tokens, packing.gamma),
            prefills,
            packing.coefficients,
            packing,
        )

        def keeps(slot: int, wish: RoutingRequest, prefills: bool) -> bool:
            return self._keeps_tpot(board.instances[slot], packing, wish, prefills)

        return find_best_fit(fullness, keeps, wish, prefills)

    def _keeps_tpot(
        self, instance: RoutedInstance, packing: BestFitModel, wish: RoutingRequest, prefills: bool
    ) -> bool:
        """(d) and (e) by what this router has sent there."""
        ledger, stated, now = instance.in_flight, instance.registration, self._clock()
        step_ms = packing.coefficients.predict_decode_ms(
            len(ledger.decoding_requests), ledger.weighted_context
        )
        running = [(wish.output_tokens, float(wish.prompt_tokens))]
        saved_ms = _INF
        for each in ledger.decoding_requests:
            since, left = each.decoding_since, each.output_tokens
            held = float(each.prompt_tokens)
            if since is not None:
                decoding_ms = (now - since) * 1000
                made, left = guess_progress(left, decoding_ms, step_ms)
                held += made
                spare_ms = compute_saved_ms(made + 1.0, decoding_ms, packing.tpot_ms, packing.theta)
                saved_ms = min(saved_ms, spare_ms)
            running.append((left, held))
        running.sort(reverse=True)
        lefts, helds = zip(*running, strict=True)
        return keeps_running(
            helds,
            lefts,
            saved_ms,
            ledger.prompt.pending,
            wish.prompt_tokens,
            prefills,
            stated.kv_blocks_total * stated.kv_block_size,
            packing.coefficients,
            packing,
        )


def find_slots(board: ScoreTable, names: Collection[str]) -> list[int]:
    """The slots of named instances."""
    return [s for s, i in enumerate(board.instances) if i.name in names] if names else []


def _read_scores(board: ScoreTable, purpose: int, closed: list[int]) -> Scores:
    """A column of the board as an array in which `closed` slots are closed as well."""
    line = (board.prefill, board.decode, board.mixed)[purpose]
    return close_slots(line.to_array(), closed) if closed else line.to_array()
