"""Applies the dispatch policy to the scores of one table. Used by the router for every request.

What is hard: the common policies take the lowest score of a column and must cost no more than
that; the others also depend on the request. A closed instance is never picked, a stale one only if
all open ones are stale.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from cleave.api.enums import DispatchPolicy
from cleave.policy import best_fit, dispatch, prefix_cache
from cleave.policy.best_fit import BestFitModel
from cleave.policy.dispatch import NONE, TO_DECODE, TO_PREFILL, TO_WHOLE, CellNumbers, Scores
from cleave.policy.output_length import guess_progress
from cleave.policy.prefix_cache import TOKENS_PER_BLOCK, PrefixIndex
from cleave.policy.session_affinity import find_attached, goes_back, to_key
from cleave.router.instance import RoutedInstance
from cleave.router.iteration_time_fit import IterationTimeEstimator
from cleave.router.registry import ServedModel
from cleave.router.score_table import ScoreTable

_INF = math.inf


class CachedPrompt(NamedTuple):
    """Where a prompt was computed before that must be computed again."""

    boot_id: str
    tokens: int


class RoutingRequest:
    """The properties of a request that policies use."""

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
        """Hashes of the prompt's blocks, for PrefixAware."""
        self.session = session
        """Key of its session, for session affinity; None: none."""
        self.adapter = adapter
        """Key of its adapter, if requests of an adapter stay together; else None."""
        self.cached = cached


class EndpointSelector:
    """One policy with its state: the random seed and the index of cached prompts."""

    def __init__(
        self,
        policy: DispatchPolicy,
        iteration_times: IterationTimeEstimator,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        """`clock`: seconds; `seed`: above 0, for random policies."""
        rule = dispatch.RULES[policy]
        self._is_by_score = dispatch.is_by_score(rule)
        self._counts = rule.counts
        self._picks = rule.prefill, rule.decode
        self._keeps_adapters = rule.keeps_adapters
        self._prefers_own = rule.prefers_own
        self._is_by_text = rule.prefill == dispatch.CACHED
        self._iteration_times = iteration_times
        self._clock = clock
        self._seed = seed
        self._prefix_index = PrefixIndex()

    def build_request(
        self,
        prompt_tokens: int,
        output_tokens: float,
        session: bytes | None,
        text: bytes | memoryview,
        served: ServedModel,
        cached: CachedPrompt | None,
    ) -> RoutingRequest:
        """The properties that this policy uses; the others are not computed."""
        adapter = served.adapter
        if self._is_by_score and session is None and adapter is None and cached is None:
            return RoutingRequest(prompt_tokens, output_tokens)
        key = to_key(session) if session is not None else None
        # The KV of one adapter cannot be used by another.
        hashes = prefix_cache.hash_blocks(text, adapter or 0) if self._is_by_text else ()
        if not (served.is_crowded and self._keeps_adapters):
            adapter = None
        return RoutingRequest(prompt_tokens, output_tokens, hashes, key, adapter, cached)

    def count_cached(self, instance: RoutedInstance, request: RoutingRequest) -> int:
        """Tokens of the prompt that the instance has probably computed before."""
        boot = instance.target.boot_id
        if request.cached is not None and request.cached.boot_id == boot:
            return min(request.cached.tokens, request.prompt_tokens)
        for count, holders in self._prefix_index.find(request.hashes):
            if boot in holders:
                return min(count * TOKENS_PER_BLOCK, request.prompt_tokens)
        return 0

    def record_prompt(
        self, first: RoutedInstance, second: RoutedInstance, request: RoutingRequest
    ) -> None:
        """Record that both instances of a request will cache its prompt's KV."""
        for instance in {first.name: first, second.name: second}.values():
            registration = instance.registration
            tokens = registration.kv_blocks_total * registration.kv_block_size
            self._prefix_index.add(registration.boot_id, request.hashes, tokens // TOKENS_PER_BLOCK)

    def retain_boots(self, boots: Collection[str]) -> None:
        """Drop the cached prompts of all other boots."""
        self._prefix_index.retain(boots)

    def select_pair(
        self, table: ScoreTable, closed: list[int], request: RoutingRequest
    ) -> tuple[int, int]:
        """(prefill slot, decode slot), or (NONE, slot): both phases there; (NONE, NONE): none.
        `closed`: slots to exclude."""
        queues, closed_pairs = table.pending_prompt, table.closed_pairs
        is_plain = request.session is None and request.adapter is None and request.cached is None
        is_simple = is_plain and not closed and not table.is_shared and table.cells is None
        if self._is_by_score and is_simple:
            if closed_pairs.count:
                return _choose_open_pair(table)
            return dispatch.choose_least_pair(table.prefill, table.decode, table.mixed, queues)

        def find(purpose: int, request: RoutingRequest, first: int) -> int:
            scores = _read_scores(table, purpose, closed)
            if not scores.size:
                return NONE
            if closed_pairs.count:
                scores = _close_pairs(table, scores, purpose, closed, first)
            cells = table.cells
            if cells is not None and purpose == TO_PREFILL and table.decode.size:
                decode = _read_scores(table, TO_DECODE, closed)
                scores = self._add_cell_costs(table, cells, scores, decode, request)
            elif cells is not None and purpose == TO_DECODE:
                scores = dispatch.restrict_to_cell(scores, cells, first)
            return self.find_slot(table, scores, purpose, request)

        return dispatch.select_pair(find, request, table.decode, queues)

    def find_slot(
        self, table: ScoreTable, scores: Scores, purpose: int, request: RoutingRequest
    ) -> int:
        """The slot for one purpose: TO_PREFILL, TO_DECODE or TO_WHOLE (both phases)."""
        if not scores.size:
            return NONE
        slot = self._find_by_rule(table, scores, purpose, request)
        if purpose != TO_PREFILL or request.cached is None or slot == NONE:
            return slot
        cached_slot = table.slot_by_boot.get(request.cached.boot_id, NONE)
        if cached_slot == NONE or scores[cached_slot] == _INF:
            return slot
        queue = table.pending_prompt.get_score(cached_slot)
        shortest = table.pending_prompt.get_score(slot)
        return cached_slot if goes_back(queue, shortest, request.cached.tokens) else slot

    def _find_by_rule(
        self, table: ScoreTable, scores: Scores, purpose: int, request: RoutingRequest
    ) -> int:
        """The slot by session or adapter affinity, else by the policy's rule."""
        session, adapter, prefixes = request.session, request.adapter, self._prefix_index
        if adapter is not None and purpose != TO_DECODE and prefixes.contains(request.hashes):
            adapter = None
        if adapter is not None or (session is not None and purpose != TO_DECODE):
            queues = table.pending_prompt.to_array()
            tokens = request.prompt_tokens
            return find_attached(scores, queues, table.keys, purpose, session, adapter, tokens)
        prefill, decode = self._picks
        if prefill == dispatch.CACHED and purpose != TO_DECODE:
            slots, found = table.slot_by_boot, prefixes.find(request.hashes)
            return prefix_cache.find_least_uncached(scores, table.find_boot, slots, found)
        pick = prefill if purpose == TO_PREFILL else decode
        if pick == dispatch.FULLEST:
            slot = self._find_best_fit(table, scores, purpose == TO_WHOLE, request)
            if slot != NONE:
                return slot
        if table.is_shared and self._prefers_own:
            return self._find_own(table, scores, purpose, request)
        room, heaviness = table.room, table.heaviness
        total = request.prompt_tokens + request.output_tokens
        slot, self._seed = dispatch.find_slot(
            pick, scores, room, heaviness, total, request.output_tokens, self._seed
        )
        return slot

    def _find_own(
        self, table: ScoreTable, scores: Scores, purpose: int, request: RoutingRequest
    ) -> int:
        """The lowest score in this router's share; another's must be lower by the load added."""
        added = request.prompt_tokens + (request.output_tokens if purpose != TO_PREFILL else 0.0)
        if purpose != TO_PREFILL or self._counts != dispatch.BY_WAIT:
            return dispatch.prefer_own(scores, table.is_remote, added, 0.0)
        queue = table.instances[dispatch.find_least(scores)].in_flight.queue
        added_ms = queue.predict_ms(request.prompt_tokens, 1.0)
        return dispatch.prefer_own(scores, table.is_remote, added_ms, self._clock() * 1000)

    def _add_cell_costs(
        self,
        table: ScoreTable,
        cells: CellNumbers,
        prefill: Scores,
        decode: Scores,
        request: RoutingRequest,
    ) -> Scores:
        """Prefill scores plus the decode load of each cell; a transfer to another cell costs as
        much as computing the prompt, or as one pick or request."""
        counts_requests = self._counts in (dispatch.BY_TURN, dispatch.BY_REQUESTS)
        crossing = 1.0 if counts_requests else float(request.prompt_tokens)
        unit = 1.0
        if self._counts == dispatch.BY_WAIT:
            unit = table.instances[dispatch.find_least(prefill)].in_flight.queue.token_ms
            # Idle instances have a score in the past: raise it to now before costs are added.
            prefill = np.maximum(prefill, self._clock() * 1000)
        weight = dispatch.RESIDENT_WEIGHT * unit
        return dispatch.add_cell_costs(prefill, decode, cells, weight, crossing * unit)

    def _find_best_fit(
        self, table: ScoreTable, scores: Scores, prefills: bool, request: RoutingRequest
    ) -> int:
        """The slot by best fit (Aladdin); NONE: none fits, or too few iteration times are known."""
        model = self._iteration_times.best_fit
        if model is None:
            return NONE
        tokens, queues = request.prompt_tokens, table.pending_prompt.to_array()
        batch, context = table.batch, table.context
        weight = best_fit.compute_context_weight(tokens, request.output_tokens, model.gamma)
        fullness = best_fit.measure_fullness(
            scores, batch, context, queues, tokens, weight, prefills, model.coefficients, model
        )

        def keeps(slot: int, request: RoutingRequest, prefills: bool) -> bool:
            return self._keeps_running(table.instances[slot], model, request, weight, prefills)

        return best_fit.find_best_fit(fullness, keeps, request, prefills)

    def _keeps_running(
        self,
        instance: RoutedInstance,
        model: BestFitModel,
        request: RoutingRequest,
        need: float,
        prefills: bool,
    ) -> bool:
        """Constraints (b), (d) and (e) of `policy.best_fit`: this router's requests by their
        progress, those of others by the tokens that they hold."""
        in_flight, registration, now = instance.in_flight, instance.registration, self._clock()
        batch, context = in_flight.count_decoding(), in_flight.measure_context()
        step_ms = model.coefficients.predict_decode_ms(batch, context)
        k1 = model.coefficients.k1
        others = context = in_flight.count_others_tokens()
        running = [(request.output_tokens, float(request.prompt_tokens))]
        saved_ms = _INF
        for each in in_flight.decoding_requests:
            since, remaining = each.decoding_since, each.output_tokens
            held = float(each.prompt_tokens)
            weight = best_fit.compute_context_weight(held, remaining, model.gamma)
            if since is not None:
                decoding_ms = (now - since) * 1000
                prompt_tokens = in_flight.computed_tokens - each.prompts_before
                own_ms = best_fit.exclude_prompts(decoding_ms, prompt_tokens, k1)
                generated, remaining = guess_progress(remaining, own_ms, step_ms)
                held += generated
                tpot_ms, theta = model.tpot_ms, model.theta
                spare_ms = best_fit.compute_saved_ms(generated + 1.0, decoding_ms, tpot_ms, theta)
                saved_ms = min(saved_ms, spare_ms)
            context += best_fit.count_context(weight, held)
            running.append((remaining, held))
        running.sort(reverse=True)
        remaining_tokens, contexts = zip(*running, strict=True)
        return best_fit.keeps_running(
            contexts,
            remaining_tokens,
            batch,
            context,
            need,
            saved_ms,
            in_flight.prompt.pending,
            request.prompt_tokens,
            prefills,
            registration.kv_blocks_total * registration.kv_block_size - others,
            model.coefficients,
            model,
        )


def find_slots(table: ScoreTable, names: Collection[str]) -> list[int]:
    """The slots of named instances."""
    return [s for s, i in enumerate(table.instances) if i.name in names] if names else []


def _choose_open_pair(table: ScoreTable) -> tuple[int, int]:
    """`dispatch.choose_least_pair` where some pairs are closed: it looks past the least scores only
    if these are of a closed pair."""
    pairs, decode, mixed = table.closed_pairs, table.decode, table.mixed
    first = table.prefill.find_least()
    if first != NONE and pairs.alone[first]:
        first = dispatch.find_least(dispatch.close_slots(table.prefill.to_array(), pairs.alone))
    second = decode.find_least() if first != NONE else NONE
    if second != NONE and pairs.is_closed(first, second):
        open_decode = dispatch.close_slots(decode.to_array(), pairs.get_decodes(first))
        second = dispatch.find_least(open_decode)
    whole = mixed.find_least() if mixed.size else NONE
    return dispatch.settle(first, second, whole, decode, table.pending_prompt)


def _close_pairs(
    table: ScoreTable, scores: Scores, purpose: int, excluded: list[int], first: int
) -> Scores:
    """Scores without closed pairs: for TO_DECODE those of the prefill slot `first`, for TO_PREFILL
    the slots all of whose pairs are closed."""
    pairs = table.closed_pairs
    if purpose == TO_DECODE:
        return dispatch.close_slots(scores, pairs.get_decodes(first))
    return (
        dispatch.close_slots(scores, pairs.find_alone(excluded))
        if purpose == TO_PREFILL
        else scores
    )


def _read_scores(table: ScoreTable, purpose: int, closed: list[int]) -> Scores:
    """A column of the table as an array in which `closed` slots are closed as well."""
    column = (table.prefill, table.decode, table.mixed)[purpose]
    return dispatch.close_slots(column.to_array(), closed) if closed else column.to_array()
