"""What instances have cached of one prompt, and what it costs at each: for `policy.prompt_cost`.

Made by `router.selection` for each prompt that is known somewhere. What is hard: this is the path
of every next turn of a conversation, so blocks are looked up only where the search asks for them.
"""

import math

from cleave.policy.dispatch import NONE, TO_PREFILL, ScoreColumn
from cleave.policy.prefix_cache import CLOCK_TOKENS, estimate_cached_tokens, is_cached
from cleave.policy.prompt_cost import (
    PromptView,
    count_mixed,
    predict_cost_ms,
    predict_queue_ms,
)
from cleave.policy.session_affinity import ADAPTER_TOKENS
from cleave.router.instance import RoutedInstance
from cleave.router.prefix_index import PrefixIndex, get_holder, get_stamp
from cleave.router.routing_request import PrefixUse, RoutingRequest
from cleave.router.score_table import ScoreTable

_INF = math.inf


class CachedPromptView(PromptView):
    """One prompt and the instances of a table; `request`, a number, is not used."""

    __slots__ = (
        "_assumed", "_column", "_first", "_holders", "_index", "_is_wait", "_loaded", "_now_ms",
        "_other", "_request", "_seen", "_table",
    )  # fmt: skip

    def __init__(
        self,
        index: PrefixIndex,
        table: ScoreTable,
        column: ScoreColumn,
        request: RoutingRequest,
        first: int,
        other: int,
        assumed: float,
        purpose: int,
        now_ms: float,
    ) -> None:
        """See `EndpointSelector._find_cheapest`; `first`: where its search begins."""
        self._index, self._table, self._column = index, table, column
        self._request, self._other, self._assumed = request, other, assumed
        self._first = first
        self._is_wait = purpose == TO_PREFILL
        self._now_ms = now_ms
        # The adapter is loaded where it is pinned and where it has computed a prompt.
        self._loaded = ADAPTER_TOKENS if request.adapter is not None else 0.0
        self._holders: list[int] = []
        """Slots of the depth that was listed last."""
        self._seen: list[int] = []
        """Slots of all depths so far."""

    def find_depth(self, request: int, purpose: int, slot: int) -> int:
        """As in the base class."""
        del request, purpose
        use = find_use(self._index, self._table.instances[slot], self._request)
        return use.blocks

    def find_holder(self, request: int, purpose: int, depth: int, after: int) -> int:
        """As in the base class; a number is an index in the list of the last depth."""
        del request, purpose
        if after == NONE:
            self._list_holders(depth)
        return after + 1 if after + 1 < len(self._holders) else NONE

    def get_holder(self, handle: int) -> int:
        """As in the base class."""
        return self._holders[handle]

    def predict_at(self, request: int, purpose: int, slot: int, depth: int) -> float:
        """As in the base class."""
        del request, purpose
        instance, prompt = self._table.instances[slot], self._request
        queue, total = instance.in_flight.queue, float(prompt.prompt_tokens)
        cached = estimate_cached_tokens(depth, prompt.text_bytes, prompt.prompt_tokens)
        cached *= instance.hits.trust
        if slot == self._other:
            cached = max(cached, self._assumed)
        elif not depth:
            total += self._loaded
        score, token_ms = self._column.get_score(slot), queue.upper_token_ms
        pending = self._table.pending_prompt.get_score(slot)
        if self._is_wait:
            wait_ms = predict_queue_ms(score, pending, self._now_ms, token_ms)
        else:
            wait_ms = count_mixed(pending, score) * token_ms
        return predict_cost_ms(wait_ms, total - cached, queue.prompt_ms, token_ms)

    def predict_bound(self, request: int, purpose: int, least: int, depth: int) -> float:
        """As in the base class."""
        del request, purpose
        queue, prompt = self._table.instances[least].in_flight.queue, self._request
        cached = estimate_cached_tokens(depth, prompt.text_bytes, prompt.prompt_tokens)
        score, token_ms = self._column.get_score(least), queue.upper_token_ms
        if self._is_wait:
            wait_ms = predict_queue_ms(score, 0.0, self._now_ms, token_ms)
        else:
            pending = self._table.pending_prompt.get_score(least)
            wait_ms = count_mixed(pending, score) * token_ms
        return predict_cost_ms(wait_ms, prompt.prompt_tokens - cached, queue.prompt_ms, token_ms)

    def _list_holders(self, depth: int) -> None:
        self._holders = holders = []
        table, request, index = self._table, self._request, self._index
        block = request.blocks[depth - 1]
        # The deepest ones were read when the prompt's blocks were looked up.
        cells = request.known_uses if depth == request.known else index.list_uses(block)
        for cell in cells:
            slot = table.slot_by_holder.get(get_holder(cell), NONE)
            if slot != NONE and self._has_cached(slot, depth, get_stamp(cell)):
                holders.append(slot)
        if not index.are_all(cells) and self._first not in holders:
            stamp = index.find_spilled(block, table.instances[self._first].target.holder)
            if stamp >= 0 and self._has_cached(self._first, depth, stamp):
                holders.append(self._first)
        self._seen += holders

    def _has_cached(self, slot: int, depth: int, stamp: int) -> bool:
        """Whether an instance that has used the first `depth` blocks takes part in the search."""
        # Of each the deepest use counts.
        if slot in self._seen or self._column.get_score(slot) == _INF:
            return False
        instance = self._table.instances[slot]
        if not is_cached(instance.in_flight.read_clock(), stamp, measure_capacity(instance)):
            return False
        self._request.use = PrefixUse(instance.target.holder, depth, stamp)
        return True


def find_use(index: PrefixIndex, instance: RoutedInstance, request: RoutingRequest) -> PrefixUse:
    """What this instance has cached of the prompt."""
    use, holder = request.use, instance.target.holder
    if use.holder != holder:
        blocks, stamp = index.find_use(request.blocks, request.known, holder)
        clock = instance.in_flight.read_clock()
        if not is_cached(clock, stamp, measure_capacity(instance)):
            blocks = 0
        use = request.use = PrefixUse(holder, blocks, stamp)
    return use


def measure_capacity(instance: RoutedInstance) -> float:
    """What this gateway's prompts may fill of the KV of an instance, in units of CLOCK_TOKENS."""
    return float(instance.kv_tokens) / float(CLOCK_TOKENS * instance.num_routers)
