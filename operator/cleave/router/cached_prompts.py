"""What instances have cached of one prompt, and what it costs at each: for `policy.prompt_cost`.

Made by `router.selection` for each prompt that is known somewhere. What is hard: this is the path
of every next turn of a conversation, so blocks are looked up only where the search asks for them.
"""

import math

from cleave.policy.cache_horizon import measure_window
from cleave.policy.dispatch import NONE, TO_PREFILL, ScoreColumn
from cleave.policy.host_memory import measure_reach
from cleave.policy.prefix_cache import (
    CLOCK_BITS,
    CLOCK_TOKENS,
    estimate_cached_tokens,
    is_cached,
)
from cleave.policy.prefix_pull import predict_saved_ms
from cleave.policy.prompt_cost import (
    PromptView,
    count_mixed,
    predict_cost_ms,
    predict_queue_ms,
)
from cleave.policy.session_affinity import ADAPTER_TOKENS
from cleave.router.instance import Connectivity, RoutedInstance
from cleave.router.prefix_index import PrefixIndex, get_holder, get_stamp
from cleave.router.routing_request import RoutingRequest
from cleave.router.score_table import ScoreTable

_INF = math.inf


class CachedPromptView(PromptView):
    """One prompt and the instances of a table; `request`, a number, is not used."""

    __slots__ = (
        "_assumed", "_column", "_first", "_holder", "_index", "_is_wait", "_loaded", "_most",
        "_now_ms", "_other", "_request", "_seen", "_table", "_uses",
    )  # fmt: skip

    def __init__(
        self,
        index: PrefixIndex,
        table: ScoreTable,
        column: ScoreColumn,
        request: RoutingRequest,
        first: int,
        purpose: int,
        now_ms: float,
    ) -> None:
        """`column`: scores for `purpose`, with the cost of cells; `first`: the slot where the
        search begins; `now_ms`: of the router's clock, for TO_PREFILL."""
        self._index, self._table, self._column = index, table, column
        self._request, self._first = request, first
        self._other, self._assumed = NONE, 0.0
        self._is_wait = purpose == TO_PREFILL
        self._now_ms = now_ms
        self._most = 0.0
        """Tokens of the prompt that may be pulled from another instance."""
        if self._is_wait and table.instances[first].target.prefix_port:
            self._most = find_source(table, request)[1]
        # The adapter is loaded where it is pinned and where it has computed a prompt.
        self._loaded = ADAPTER_TOKENS if request.adapter is not None else 0.0
        self._uses = request.known_uses
        """Of the depth that was listed last."""
        self._holder = NONE
        """Slot of the one that was found last."""
        self._seen = 0
        """The bits of all slots that were found."""

    def set_assumed(self, slot: int, tokens: float) -> None:
        """Assume that this instance has cached at least so many tokens of the prompt."""
        self._other, self._assumed = slot, tokens

    def find_depth(self, request: int, purpose: int, slot: int) -> int:
        """As in the base class."""
        del request, purpose
        return count_blocks(self._index, self._table.instances[slot], self._request)

    def find_holder(self, request: int, purpose: int, depth: int, after: int) -> int:
        """As in the base class; a number is an index in the uses of this depth, or, for the first
        instance of the search if it is not listed there, that after the last one."""
        del request, purpose
        index, prompt, table = self._index, self._request, self._table
        block = prompt.blocks[depth - 1]
        if after == NONE:
            # The deepest ones were read when the prompt's blocks were looked up.
            self._uses = prompt.known_uses if depth == prompt.known else index.list_uses(block)
        uses = self._uses
        for at in range(after + 1, len(uses)):
            slot = table.slot_by_holder.get(get_holder(uses[at]), NONE)
            if slot != NONE and self._has_cached(slot, depth, get_stamp(uses[at])):
                return at
        if after < len(uses) and not index.are_all(uses):
            stamp = index.find_spilled(block, table.instances[self._first].target.holder)
            if stamp >= 0 and self._has_cached(self._first, depth, stamp):
                return len(uses)
        return NONE

    def get_holder(self, handle: int) -> int:
        """As in the base class."""
        del handle
        return self._holder

    def has_load(self, request: int, slot: int, depth: int) -> bool:
        """As in the base class."""
        del request, slot, depth
        return self._request.use_host_blocks > 0

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
        load_ms = 0.0
        if prompt.use_host_blocks and prompt.use_holder == instance.target.holder:
            load_ms = count_loaded(prompt) * instance.hits.trust * instance.load_token_ms
        cost_ms = predict_cost_ms(wait_ms, total - cached, queue.prompt_ms, token_ms, load_ms)
        if not self._most:
            return cost_ms
        return cost_ms - predict_pull_saving_ms(instance, cached, self._most)

    def predict_bound(self, request: int, purpose: int, least: int, depth: int) -> float:
        """As in the base class."""
        del request, purpose
        queue, prompt = self._table.instances[least].in_flight.queue, self._request
        cached = estimate_cached_tokens(depth, prompt.text_bytes, prompt.prompt_tokens)
        if least == self._other:
            cached = max(cached, self._assumed)
        score, token_ms = self._column.get_score(least), queue.upper_token_ms
        if self._is_wait:
            wait_ms = predict_queue_ms(score, 0.0, self._now_ms, token_ms)
        else:
            pending = self._table.pending_prompt.get_score(least)
            wait_ms = count_mixed(pending, score) * token_ms
        uncached = prompt.prompt_tokens - cached
        cost_ms = predict_cost_ms(wait_ms, uncached, queue.prompt_ms, token_ms, 0.0)
        if not self._most:
            return cost_ms
        return cost_ms - predict_pull_saving_ms(self._table.instances[least], cached, self._most)

    def _has_cached(self, slot: int, depth: int, stamp: int) -> bool:
        """Whether an instance that has used the first `depth` blocks takes part in the search."""
        # Of each the deepest use counts.
        if self._seen >> slot & 1 or self._column.get_score(slot) == _INF:
            return False
        instance, request = self._table.instances[slot], self._request
        host_blocks = count_host_blocks(self._index, instance, request, depth, stamp)
        if host_blocks == NONE:
            return False
        request.use_holder, request.use_blocks = instance.target.holder, depth
        request.use_host_blocks, request.use_stamp = host_blocks, stamp
        self._holder = slot
        self._seen |= 1 << slot
        return True


def count_blocks(index: PrefixIndex, instance: RoutedInstance, request: RoutingRequest) -> int:
    """Leading blocks of the prompt that this instance has probably cached; also sets `use_*` of the
    request."""
    holder = instance.target.holder
    if request.use_holder != holder:
        blocks, stamp = index.find_use(request.blocks, request.known, holder)
        host_blocks = count_host_blocks(index, instance, request, blocks, stamp)
        if host_blocks == NONE:
            blocks = host_blocks = 0
        request.use_holder, request.use_blocks, request.use_stamp = holder, blocks, stamp
        request.use_host_blocks = host_blocks
    return request.use_blocks


def count_host_blocks(
    index: PrefixIndex, instance: RoutedInstance, request: RoutingRequest, depth: int, stamp: int
) -> int:
    """How many of the first `depth` blocks of the prompt, the last of which the instance used at
    `stamp`, are probably in its host memory only; NONE: it has not even the last one there."""
    clock = instance.in_flight.read_clock()
    capacity = measure_window(clock, instance.horizon, instance.capacity)
    if is_cached(clock, stamp, capacity):
        return 0
    if not instance.host_tokens:
        return NONE
    if not is_cached(clock, stamp, measure_instance_reach(instance, clock, capacity)):
        return NONE
    # Blocks at the beginning, which other prompts share, were used later.
    low, high, holder = 0, depth - 1, instance.target.holder
    while low < high:
        middle = (low + high + 1) // 2
        used = index.find_stamp(request.blocks[middle - 1], holder)
        if used >= 0 and is_cached(clock, used, capacity):
            low = middle
        else:
            high = middle - 1
    return depth - low


def count_loaded(request: RoutingRequest) -> float:
    """Tokens of the prompt that the instance that was looked up last has in host memory only."""
    blocks, size, tokens = request.use_blocks, request.text_bytes, request.prompt_tokens
    on_gpu = estimate_cached_tokens(blocks - request.use_host_blocks, size, tokens)
    return estimate_cached_tokens(blocks, size, tokens) - on_gpu


def find_source(
    table: ScoreTable, request: RoutingRequest, excluded: RoutedInstance | None = None
) -> tuple[RoutedInstance | None, float]:
    """(the instance whose cache has most of a prompt and can be pulled from, its tokens of it), or
    (None, 0); never `excluded`, which is to pull.

    An instance that decodes has answers as well: it counts as if the prompt continued the last one
    of them, as long as the one that is predicted now. Of several the one that used it longest ago:
    later ones may not have computed it yet. An instance that has been silent or drains is not
    waited for, and one of a pair whose handoffs were wrong is not trusted with a prefix either.
    """
    cached = estimate_cached_tokens(request.known, request.text_bytes, request.prompt_tokens)
    source, most, oldest = None, 0.0, -1
    for cell in request.known_uses:
        slot = table.slot_by_holder.get(get_holder(cell), NONE)
        if slot == NONE or table.instances[slot] is excluded:
            continue
        instance = table.instances[slot]
        clock, stamp = instance.in_flight.read_clock(), get_stamp(cell)
        if not instance.target.prefix_port:
            continue
        if instance.connectivity is not Connectivity.FRESH or not instance.selectable:
            continue
        if excluded is not None and table.closed_pairs.is_closed(excluded.slot, slot):
            continue
        window = measure_window(clock, instance.horizon, instance.capacity)
        if not is_cached(clock, stamp, window):
            continue
        tokens = cached * instance.hits.trust
        if instance.target.role == "decode":
            tokens = min(tokens + request.output_tokens, float(request.prompt_tokens))
        age = (clock - stamp) % (1 << CLOCK_BITS)
        if tokens > most or (tokens == most and age > oldest):
            source, most, oldest = instance, tokens, age
    return source, most


def predict_pull_saving_ms(instance: RoutedInstance, cached: float, most: float) -> float:
    """What a prompt of which the instance has `cached` tokens gains there if it pulls the rest of
    `most` tokens; 0 if that is not a block of KV, or it has not measured how long that takes."""
    registration = instance.registration
    link_token_ms = registration.kv_path.token_ms
    if most < cached + registration.kv_block_size or link_token_ms <= 0.0:
        return 0.0
    # Measured with a short prompt, whose latency it contains.
    return predict_saved_ms(cached, most, instance.in_flight.queue.token_ms, 0.0, link_token_ms)


def measure_instance_reach(instance: RoutedInstance, clock: int, capacity: float) -> float:
    """How much is written while the KV of an instance, which keeps a block for `capacity`, or its
    host memory has it, in units of CLOCK_TOKENS."""
    sent, _, cached = instance.in_flight.predict_hits()
    return measure_reach(
        capacity,
        float(instance.host_tokens) / float(CLOCK_TOKENS * instance.num_routers),
        float(clock),
        (sent - cached * instance.hits.trust) / CLOCK_TOKENS,
    )
