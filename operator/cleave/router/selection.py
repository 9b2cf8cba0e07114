"""Applies the dispatch policy to the scores of one table. Used by the router for every request.

What is hard: the common policies take the lowest score of a column and must cost no more than
that; the others also depend on the request. A closed instance is never picked, a stale one only if
all open ones are stale.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np

from cleave.api.enums import DispatchPolicy
from cleave.policy import best_fit, dispatch
from cleave.policy.best_fit import BestFitModel
from cleave.policy.cache_horizon import measure_window
from cleave.policy.dispatch import (
    NONE,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    CellNumbers,
    ScoreColumn,
    Scores,
)
from cleave.policy.output_length import guess_progress
from cleave.policy.prefix_cache import (
    FIRST_BLOCK_BYTES,
    RepeatDetector,
    RepeatDetectors,
    estimate_cached_tokens,
    hash_alike,
    hash_blocks,
    hash_first_block,
    is_cached,
)
from cleave.policy.prompt_cost import count_all_mixed, find_cheapest
from cleave.policy.reuse_times import LastUses, ReuseTimes
from cleave.policy.session_affinity import find_attached, goes_back, to_key
from cleave.router.cached_prompts import (
    CachedPromptView,
    count_blocks,
    count_loaded,
    find_source,
    predict_pull_saving_ms,
)
from cleave.router.instance import RoutedInstance
from cleave.router.iteration_time_fit import IterationTimeEstimator
from cleave.router.prefix_index import (
    PrefixIndex,
    PrefixMemory,
    to_holder,
)
from cleave.router.routing_request import CachedPrompt, RoutingRequest
from cleave.router.score_table import (
    ArrayScoreColumn,
    ScoreTable,
    WritableScoreColumn,
    compute_headroom_of,
)
from cleave.router.served_models import ServedModel

_INF = math.inf
_REFRESHES = 4
"""Stamps of used blocks are renewed after this part of the time for which they stay cached."""
_SHARE_WEIGHT = 1 / 64
"""Weight of the newest prompt in the share of cached tokens."""


class EndpointSelector:
    """One policy with its state: the random seed and the index of cached prompts."""

    def __init__(
        self,
        policy: DispatchPolicy,
        iteration_times: IterationTimeEstimator,
        clock: Callable[[], float],
        seed: int,
        prefix_memory: PrefixMemory,
        headroom_ms: float = 0.0,
    ) -> None:
        """`clock`: seconds; `seed`: above 0, for random policies; `prefix_memory`: of the index;
        `headroom_ms`: as in `RoutingRules`."""
        rule = dispatch.RULES[policy]
        self._is_by_score = dispatch.is_by_score(rule)
        self._counts = rule.counts
        self._picks = rule.prefill, rule.decode
        self._keeps_adapters = rule.keeps_adapters
        self._prefers_own = rule.prefers_own
        self._headroom = HeadroomColumn(headroom_ms)
        self.reads_text = rule.prefill == dispatch.CACHED
        """Whether the policy looks at cached prompts, where prompts repeat."""
        self._iteration_times = iteration_times
        self._clock = clock
        self._seed = seed
        self._index = PrefixIndex(prefix_memory)
        self._repeats = RepeatDetectors()
        self._last_uses = LastUses(prefix_memory.last_uses)
        self.reuse_times: dict[str, ReuseTimes] = defaultdict(ReuseTimes)
        """By model, for policies that look at prompts."""
        self._cached_share = 0.0
        """Share of recent prompts' tokens that was predicted to be cached."""

    def build_request(
        self,
        model: str,
        prompt_tokens: int,
        output_tokens: float,
        session: bytes | None,
        text: bytes | memoryview,
        salt: bytes,
        served: ServedModel,
        cached: CachedPrompt | None,
    ) -> RoutingRequest:
        """The properties that this policy uses; the others are not computed."""
        request = RoutingRequest(prompt_tokens, output_tokens)
        request.cached = cached
        if self.reads_text and len(text) > FIRST_BLOCK_BYTES:
            # The KV of one adapter cannot be used by another.
            seed = self._index.find_seed(served.engine_name or model, salt)
            repeats = self._repeats.find(seed)
            if repeats.is_repeating or repeats.is_sampled(text):
                self._find_blocks(request, repeats, seed, text)
        if session is not None:
            request.session = to_key(session)
        if served.adapter is not None and served.is_crowded and self._keeps_adapters:
            request.adapter = served.adapter
        return request

    def count_cached(self, instance: RoutedInstance, request: RoutingRequest) -> float:
        """Tokens of the prompt that the instance has probably computed before."""
        return self.correct(instance, request, self.predict_cached(instance, request))

    def correct(self, instance: RoutedInstance, request: RoutingRequest, predicted: float) -> float:
        """`count_cached`, given `predict_cached`."""
        cached = request.cached
        if cached is not None and cached.boot_id == instance.target.boot_id:
            return min(cached.tokens, request.prompt_tokens)
        return predicted * instance.hits.trust

    def predict_cached(self, instance: RoutedInstance, request: RoutingRequest) -> float:
        """Tokens of the prompt in blocks that the instance has used, which it is expected to have
        cached; `count_cached` corrects this by what the engine reports."""
        if not request.known:
            return 0.0
        blocks = count_blocks(self._index, instance, request)
        return estimate_cached_tokens(blocks, request.text_bytes, request.prompt_tokens)

    def predict_loaded(self, request: RoutingRequest) -> float:
        """Those of the tokens of the latest `predict_cached` that are in host memory only."""
        return count_loaded(request) if request.use_host_blocks else 0.0

    def count_most_cached(self, request: RoutingRequest) -> float:
        """Tokens of the prompt that any engine has computed before."""
        known = request.known
        return estimate_cached_tokens(known, request.text_bytes, request.prompt_tokens)

    def choose_source(
        self, instance: RoutedInstance, request: RoutingRequest, cached: float
    ) -> tuple[RoutedInstance | None, float]:
        """(the instance from whose cache a prefill instance is to pull what it lacks of the
        beginning of a prompt, of which it probably has `cached` tokens; how many it then has), or
        (None, `cached`): none. The engine knows best what it lacks, so a source is named also where
        nothing is expected to be pulled."""
        table = instance.score_table
        if not instance.target.prefix_port or not isinstance(table, ScoreTable):
            return None, cached
        source, most = find_source(table, request, instance)
        if source is None or predict_pull_saving_ms(instance, 0.0, most) <= 0.0:
            return None, cached
        if predict_pull_saving_ms(instance, cached, most) > 0.0:
            return source, most
        # An engine pulls before it looks at host memory, so it must not try what is there.
        return None if request.use_host_blocks else source, cached

    def record_prompt(self, instance: RoutedInstance, request: RoutingRequest) -> list[int]:
        """Record that an instance will cache the prompt's KV; the blocks that are new to it."""
        known = count_blocks(self._index, instance, request)
        clock = instance.in_flight.read_clock()
        # Rewriting the stamps of what was used lately would cost more than it improves.
        window = measure_window(clock, instance.horizon, instance.capacity)
        start = known if is_cached(clock, request.use_stamp, window / _REFRESHES) else 0
        if start < len(request.blocks):
            self._index.record(request.blocks, start, instance.target.holder, clock)
        return request.blocks[known:] if known < len(request.blocks) else []

    def record_reuse(self, model: str, request: RoutingRequest, is_retry: bool) -> None:
        """Count after how long a prompt repeats others, if the policy looks at prompts. Those that
        are not looked up are new, and a retry repeats nothing."""
        if is_retry or not self.reads_text:
            return
        times, tokens = self.reuse_times[model], request.prompt_tokens
        if request.blocks:
            self._last_uses.record(
                request.blocks, request.known, request.text_bytes, tokens, self._clock(), times
            )
        else:
            times.add_new(float(tokens))

    def forget_prompt(self, blocks: list[int], holder: int) -> None:
        """Take back new blocks of a prompt that was not computed."""
        self._index.forget(blocks, holder)

    def observe_cached(self, prompt_tokens: float, cached_tokens: float) -> None:
        """Count a prompt whose blocks were looked up."""
        if prompt_tokens > 0.0:
            share = cached_tokens / prompt_tokens
            self._cached_share += (share - self._cached_share) * _SHARE_WEIGHT

    def retain_boots(self, boots: Collection[str]) -> None:
        """Forget all other boots."""
        self._index.retain(dict.fromkeys(map(to_holder, boots)))

    def select_pair(
        self, table: ScoreTable, closed: list[int], request: RoutingRequest
    ) -> tuple[int, int]:
        """(prefill slot, decode slot), or (NONE, slot): both phases there; (NONE, NONE): none.
        `closed`: slots to exclude."""
        queues, closed_pairs, headroom = table.pending_prompt, table.closed_pairs, self._headroom
        headroom.instances = table.instances
        is_plain = request.session is None and request.adapter is None and request.cached is None
        if self._is_by_score and is_plain and not closed and table.cells is None:
            is_least = not request.known and not table.is_shared
            if is_least and not closed_pairs.count:
                return dispatch.choose_least_pair(
                    table.prefill, table.decode, table.mixed, queues, headroom
                )
            if is_least:
                return _choose_open_pair(table, headroom)
            if not closed_pairs.count:
                return self._choose_plain_pair(table, request)

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

        def count(request: RoutingRequest, slot: int) -> float:
            return self._count_cached_at(table, request, slot)

        return dispatch.select_pair(find, count, request, table.decode, queues, headroom)

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
        """The slot by session or adapter affinity and cached prompts, else by the policy's rule."""
        session, adapter = request.session, request.adapter
        if adapter is not None or (session is not None and purpose != TO_DECODE):
            queues = table.pending_prompt.to_array()
            tokens = request.prompt_tokens
            slot = find_attached(scores, queues, table.keys, purpose, session, adapter, tokens)
            if purpose == TO_DECODE or not request.known or slot == NONE:
                return slot
            column, waits = ArrayScoreColumn(scores), scores
            if purpose != TO_PREFILL:
                waits = count_all_mixed(queues, scores)
            least = dispatch.find_least(waits)
            view = self._view(table, column, request, slot, purpose)
            # A session's prompts are cached where it is pinned, also those that are not known here.
            view.set_assumed(slot, float(tokens) if session is not None else 0.0)
            return find_cheapest(view, 0, purpose, slot, least, request.known)
        if purpose != TO_DECODE and request.blocks:
            return self._find_by_caches(table, ArrayScoreColumn(scores), purpose, request)
        prefill, decode = self._picks
        pick = prefill if purpose == TO_PREFILL else decode
        if pick == dispatch.FULLEST:
            slot = self._find_best_fit(table, scores, purpose == TO_WHOLE, request)
            if slot != NONE:
                return slot
        if table.is_shared and self._prefers_own:
            return self._find_own(table, ArrayScoreColumn(scores), purpose, request)
        room, heaviness = table.room, table.heaviness
        total = request.prompt_tokens + request.output_tokens
        slot, self._seed = dispatch.find_slot(
            pick, scores, room, heaviness, total, request.output_tokens, self._seed
        )
        return slot

    def _find_by_caches(
        self, table: ScoreTable, column: WritableScoreColumn, purpose: int, request: RoutingRequest
    ) -> int:
        """The slot where a prompt costs least, among this router's own if several share a fleet,
        unless another one's costs less. `column`: scores, with the cost of cells."""
        if table.is_shared and self._prefers_own:
            waits = column if purpose == TO_PREFILL else table.measure_waits(column)
            slot = self._find_own(table, waits, purpose, request)
        elif purpose == TO_PREFILL:
            slot = column.find_least()
        else:
            slot = table.find_shortest_wait(column)
        known = request.known
        is_partly_new = table.num_routers > 1 and known < len(request.blocks)
        if slot == NONE or not (known or is_partly_new):
            return slot
        view = self._view(table, column, request, slot, purpose)
        best = find_cheapest(view, 0, purpose, slot, slot, known) if known else slot
        if is_partly_new:
            best = self._compare_first_copy(table, column, view, purpose, request, slot, best)
        return best

    def _find_blocks(
        self, request: RoutingRequest, repeats: RepeatDetector, seed: int, text: bytes | memoryview
    ) -> None:
        """Find the blocks of a prompt in the index."""
        index = self._index
        request.text_bytes = len(text)
        request.text = text
        if repeats.is_repeating or index.contains(hash_first_block(text, seed)):
            request.blocks = blocks = hash_blocks(text, seed)
            request.known, request.known_uses = index.find_known(blocks)
        else:
            request.blocks = [hash_first_block(text, seed)]
        repeats.observe(float(request.prompt_tokens), self.count_most_cached(request))

    def _count_cached_at(self, table: ScoreTable, request: RoutingRequest, slot: int) -> float:
        """`count_cached` of a slot."""
        return self.count_cached(table.instances[slot], request) if request.known else 0.0

    def _choose_plain_pair(self, table: ScoreTable, request: RoutingRequest) -> tuple[int, int]:
        """`dispatch.select_pair` by scores or caches, without arrays for few instances."""
        first = self._find_plain(table, table.prefill, TO_PREFILL, request)
        second = NONE
        if first != NONE:
            second = self._find_plain(table, table.decode, TO_DECODE, request)
        whole = self._find_plain(table, table.mixed, TO_WHOLE, request)
        cached, cached_whole = 0.0, 0.0
        if second != NONE and whole != NONE:
            cached = self._count_cached_at(table, request, first)
            cached_whole = self._count_cached_at(table, request, whole)
        queues, headroom = table.pending_prompt, self._headroom
        return dispatch.settle(
            first, second, whole, table.decode, queues, headroom, cached, cached_whole
        )

    def _find_plain(
        self, table: ScoreTable, column: WritableScoreColumn, purpose: int, request: RoutingRequest
    ) -> int:
        """`find_slot` of a request that has neither a session nor an adapter."""
        if not column.size:
            return NONE
        if purpose != TO_DECODE and request.blocks:
            return self._find_by_caches(table, column, purpose, request)
        if table.is_shared and self._prefers_own:
            return self._find_own(table, column, purpose, request)
        return column.find_least()

    def _view(
        self,
        table: ScoreTable,
        column: WritableScoreColumn,
        request: RoutingRequest,
        first: int,
        purpose: int,
    ) -> CachedPromptView:
        """A view for a search that begins at slot `first`."""
        now_ms = self._clock() * 1000 if purpose == TO_PREFILL else 0.0
        return CachedPromptView(self._index, table, column, request, first, purpose, now_ms)

    def _compare_first_copy(
        self,
        table: ScoreTable,
        column: WritableScoreColumn,
        view: CachedPromptView,
        purpose: int,
        request: RoutingRequest,
        least: int,
        best: int,
    ) -> int:
        """`best`, or the instance to which all gateways prefer to send what none has computed, if
        the prompt costs less there. `least`: the slot with the shortest wait.

        Gateways do not know each other's prompts. So all prefer the same instance for the first
        block that is new to them, and it is expected to have cached what is usual of the prompts
        that the others get.
        """
        known, routers = request.known, table.num_routers
        most = self.count_most_cached(request)
        rest = request.prompt_tokens - most
        expected = self._cached_share * rest * (routers - 1) / routers
        ms = view.predict_at(0, purpose, best, view.find_depth(0, purpose, best))
        if expected <= most and ms <= view.predict_bound(0, purpose, least, known):
            return best
        other = table.find_preferred(hash_alike(request.text, known), column)
        if other in (NONE, least, best):
            return best
        view.set_assumed(other, expected)
        # What it has cached is looked up only if it would cost less with all that is known.
        if view.predict_at(0, purpose, other, known) >= ms:
            return best
        depth = view.find_depth(0, purpose, other)
        return other if view.predict_at(0, purpose, other, depth) < ms else best

    def _find_own(
        self, table: ScoreTable, column: WritableScoreColumn, purpose: int, request: RoutingRequest
    ) -> int:
        """The lowest score in this router's share; another's must be lower by the load added."""
        added = request.prompt_tokens + (request.output_tokens if purpose != TO_PREFILL else 0.0)
        if purpose != TO_PREFILL or self._counts != dispatch.BY_WAIT:
            return table.find_own(column, added, 0.0)
        least = column.find_least()
        if least == NONE:
            return NONE
        added_ms = table.instances[least].in_flight.queue.predict_ms(request.prompt_tokens, 1.0)
        return table.find_own(column, added_ms, self._clock() * 1000)

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
            queue = table.instances[dispatch.find_least(prefill)].in_flight.queue
            # Above 0, which times the score of a closed slot would not be a number.
            unit = max(queue.token_ms, dispatch.TIE_WEIGHT)
            # Idle instances have a score in the past: raise it to now before costs are added.
            now_ms = self._clock() * 1000
            prefill = np.maximum(prefill, now_ms)
            if request.known:
                # And overdue ones to what `predict_queue_ms` says of them.
                queues = [each.in_flight.queue.upper_token_ms for each in table.instances]
                prefill = np.maximum(prefill, now_ms + table.pending_prompt.to_array() * queues)
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


class HeadroomColumn(ScoreColumn):
    """`dispatch.compute_headroom` of instances, computed when it is read: only where mixed
    instances may take prompts."""

    __slots__ = ("_wait_ms", "instances")

    def __init__(self, wait_ms: float) -> None:
        super().__init__(0)
        self._wait_ms = wait_ms
        self.instances: list[RoutedInstance] = []
        """By slot, of the table that is searched."""

    def get_score(self, slot: int) -> float:
        """Prompt tokens that may wait more at the instance than at a mixed one."""
        return compute_headroom_of(self.instances[slot], self._wait_ms)


def find_slots(table: ScoreTable, names: Collection[str]) -> list[int]:
    """The slots of named instances."""
    return [s for s, i in enumerate(table.instances) if i.name in names] if names else []


def _choose_open_pair(table: ScoreTable, headroom: ScoreColumn) -> tuple[int, int]:
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
    queues = table.pending_prompt
    return dispatch.settle(first, second, whole, decode, queues, headroom, 0.0, 0.0)


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
