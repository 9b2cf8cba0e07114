"""Picks the instances for each request and accounts for its load. A library: the gateway calls it
for every request, and the gRPC service exposes it to other gateways.

What is hard: prefill and decode instances are picked together: of one deployment and revision, with
verified KV paths, and in one cell if that cell can decode. Else the fallback policy decides.
A prefill instance serves a whole request only as the last resort of `Always`: every engine can, and
a slow response is better than none, but it delays other prompts.
"""

import enum
import itertools
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cleave.api.enums import FallbackPolicy
from cleave.policy import dispatch
from cleave.policy.best_fit import GAMMA, compute_context_weight
from cleave.policy.dispatch import NONE, STALE_PENALTY, TO_WHOLE
from cleave.policy.output_length import ConditionalMean, LengthPredictor
from cleave.router.errors import NoInstance, describe_unavailable
from cleave.router.instance import Connectivity, InFlightLoad, RoutedInstance, Target
from cleave.router.iteration_time_fit import IterationTimeEstimator
from cleave.router.prefix_index import PrefixMemory
from cleave.router.registry import InstanceRegistry
from cleave.router.routing_request import CachedPrompt, RoutingRequest
from cleave.router.score_table import ScoreTable, WritableScoreColumn
from cleave.router.selection import EndpointSelector, find_slots
from cleave.router.served_models import ServedModel
from cleave.router.shared_score_table import ChangeLogScoreTable

UNKNOWN_OUTPUT_TOKENS = 256
"""Predicted output length before any response has ended."""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """Settings from the plan."""

    short_prompt_tokens: int = 0
    """Requests with at most this many uncached prompt tokens run on a decode instance alone while
    every prefill instance has a longer queue; computed by `policy.short_prompts`; 0: never."""
    ttft_ms: float = math.inf
    """TTFT target of BestFit."""
    tpot_ms: float = math.inf
    """TPOT target of BestFit."""
    headroom_ms: float = 0.0
    """How much longer prompts wait at prefill instances than at mixed ones, which also decode
    (`dispatch.compute_headroom`); 0: as long."""


_MAX_ATTEMPTS = 3
"""Limit of selections per request in a shared router; other processes may be faster each time."""
_PRUNE_EVERY = 4096
"""Number of picks after which engines that are gone are forgotten."""

_ALWAYS_OBSERVED = 1024
"""Number of first completions that all train the length predictor."""
_OBSERVE_EVERY = 8
"""Afterwards, one completion of this many does."""


class RequestPhase(enum.Enum):
    """The phases of a request to release."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"


_PREFILL_PHASE, _DECODE_PHASE = RequestPhase.PREFILL, RequestPhase.DECODE
"""Compared for every request; an attribute of an enum takes as long to read as a call."""


class Pick:
    """The instances picked for a request; counts as load in flight until released."""

    __slots__ = (
        "_decode_entry", "_is_counted", "_is_looked_up", "_new_blocks", "_prefill_entry", "_pulled",
        "decode", "decoding_before", "decoding_since", "engine_model", "output_tokens",
        "predicted_cached", "predicted_loaded", "prefill", "prompt_tokens", "prompts_before",
        "reason", "source",
    )  # fmt: skip

    def __init__(
        self,
        prefill: RoutedInstance | None,
        decode: RoutedInstance,
        reason: str,
        prompt_tokens: int,
        output_tokens: float,
        engine_model: str = "",
    ) -> None:
        self.engine_model = engine_model
        """The engines' name of an adapter that was loaded at run time; empty: the request's."""
        self.prefill: Target | None = prefill.target if prefill is not None else None
        """None: the decode target runs both phases."""
        self.decode: Target = decode.target
        self.reason = reason
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Predicted."""
        self.decoding_since: float | None = None
        """Seconds of the router's clock; None: its prompt is not computed yet."""
        self.prompts_before = 0.0
        """`computed_tokens` of its decode instance at that time; for BestFit only."""
        self.decoding_before = 0.0, 0.0
        """What `change_decoding` of its decode instance returned then; for BestFit only."""
        self.predicted_cached = 0.0
        """Tokens of its prompt that were predicted to be cached where it is computed."""
        self.predicted_loaded = 0.0
        """Those of them that were predicted to be in host memory only."""
        self.source: Target | None = None
        """From whose prefix cache the prefill target pulls what it lacks of the beginning of the
        prompt; None: it computes that."""
        self._pulled = 0.0
        """Tokens that it is predicted to pull from there."""
        self._is_looked_up = False
        """Whether the prompt's blocks were looked up."""
        self._new_blocks: tuple[tuple[list[int], int], ...] = ()
        """(blocks, engine) that its prompt has added to the index: of the engine that computes it,
        and of the one that decodes."""
        self._is_counted = False
        """Whether the prompt counts as computed, in the clock of the cache."""
        self._prefill_entry: tuple[RoutedInstance, InFlightLoad, float] | None = None
        """(instance, its load accounting, uncached prompt tokens); None: released."""
        self._decode_entry: tuple[RoutedInstance, InFlightLoad, float] | None = None
        """(instance, its load accounting, prompt and predicted output tokens); None: released."""

    @property
    def is_open(self) -> bool:
        """Whether any of it still counts as load in flight."""
        return self._prefill_entry is not None or self._decode_entry is not None


Selection = tuple[RoutedInstance | None, RoutedInstance, str]
"""(prefill instance or None, instance that decodes or runs both phases, reason)"""


class Router:
    """Picks instances of a registry, which the agent watcher keeps up to date."""

    def __init__(
        self,
        registry: InstanceRegistry,
        fallback: FallbackPolicy = FallbackPolicy.ALWAYS,
        rules: RoutingRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        prefix_memory: PrefixMemory | None = None,
    ) -> None:
        """`clock`: seconds; `seed`: above 0, for random policies; `prefix_memory`: shared with the
        other processes of a gateway; None: there are none."""
        self.registry = registry
        self.length_predictor: LengthPredictor = ConditionalMean(UNKNOWN_OUTPUT_TOKENS)
        """Predicts output lengths; `observe_completion` trains it."""
        self._fallback = fallback
        rules = rules or RoutingRules()
        self._short_prompt_tokens = rules.short_prompt_tokens
        self._iteration_times = IterationTimeEstimator(rules.ttft_ms, rules.tpot_ms)
        self._clock = clock
        self._selector = EndpointSelector(
            registry.policy,
            self._iteration_times,
            clock,
            seed or random.randrange(1, 2147483647),
            prefix_memory or PrefixMemory(),
            rules.headroom_ms,
        )
        self.headroom_ms = rules.headroom_ms
        """As in the rules."""
        rule = dispatch.RULES[registry.policy]
        self.uses_prompt_text = self._selector.reads_text
        """Whether the policy uses the prompt's text."""
        self.reuse_times = self._selector.reuse_times
        # For other policies the accounting of these two would add a few percent to a request.
        self._tracks_decoding = rule.decode in (dispatch.LIGHTEST, dispatch.FULLEST)
        self._fits_iteration_times = rule.decode == dispatch.FULLEST
        self._num_picks = self._num_completed = 0
        shared_load = registry.shared_load
        count = itertools.count(1).__next__
        self._count_pick = shared_load.count_pick if shared_load is not None else count

    def set_short_prompt_tokens(self, tokens: int) -> None:
        """Apply another plan's `RoutingRules.short_prompt_tokens` to all requests from now on."""
        self._short_prompt_tokens = tokens

    def pick(
        self,
        model: str,
        prompt_tokens: int,
        output_tokens: int = 0,
        *,
        colocated: bool = False,
        excluded: Collection[str] = (),
        suspect: Collection[str] = (),
        prefill_lost: bool = False,
        session: bytes | None = None,
        text: bytes | memoryview = b"",
        salt: bytes = b"",
        cached: CachedPrompt | None = None,
    ) -> Pick:
        """Pick the instances of a request and add its load.

        `prompt_tokens`: estimated; `output_tokens`: its output limit, 0: none. `colocated`: it must
        not be split. `excluded`: instances that failed it; `suspect`: instances that rejected it,
        used only if no other one is left. `prefill_lost`: a prefill instance failed during it.
        `session`: requests with equal values go to one instance where that costs little. `text`:
        the prompt, for policies that track cached prefixes; `salt`: only requests with an equal one
        share them. `cached`: where the prompt was computed before. Raises RouterError.
        """
        served = self.registry.models.get(model)
        if served is None:
            raise self.registry.build_error(model)
        is_retry = bool(excluded or suspect or prefill_lost)
        if served.lacking:
            excluded = served.lacking.union(excluded)
        exclusions = [{*excluded, *suspect}, excluded] if suspect else [excluded]
        length = self.length_predictor.predict(prompt_tokens, output_tokens)
        request = self._selector.build_request(
            model, prompt_tokens, length, session, text, salt, served, cached
        )
        selection = self._select(model, served, request, colocated, exclusions, prefill_lost)
        prefill, decode, reason = selection
        picked = Pick(prefill, decode, reason, prompt_tokens, length, served.engine_name)
        self._add_load(picked, prefill, decode, request)
        self._selector.record_reuse(model, request, is_retry)
        return picked

    def reserve(
        self, prefill: RoutedInstance, decode: RoutedInstance, prompt_tokens: int, output: int
    ) -> Pick:
        """Add the load of a request to these two instances, as `pick` does for those it picks."""
        length = float(output)
        picked = Pick(prefill, decode, "reserved", prompt_tokens, length)
        self._add_load(picked, prefill, decode, RoutingRequest(prompt_tokens, length))
        return picked

    def release(self, pick: Pick, phase: RequestPhase = RequestPhase.ALL) -> None:
        """Remove the load of a request or of one phase; repeating it does nothing."""
        entry = pick._prefill_entry
        if entry is not None and phase is not _DECODE_PHASE:
            pick._prefill_entry = None
            now = pick.decoding_since = self._clock()
            instance, in_flight, tokens = entry
            in_flight.prompt.remove(tokens)
            in_flight.num_prompts -= 1
            if self._fits_iteration_times and pick._decode_entry is not None:
                load = pick._decode_entry[1]
                pick.decoding_before = load.change_decoding(1, _compute_weight(pick), now)
            if phase is _PREFILL_PHASE:
                if self.uses_prompt_text:
                    self._count_computed(pick, instance, in_flight, tokens)
                # Of a prompt that is pulled or copied back in part, the time says nothing of
                # computing.
                counted = tokens if not (pick._pulled or pick.predicted_loaded) else 0.0
                queue, remote = in_flight.queue, in_flight.prompt.remote
                ms = queue.observe_completion(counted, now * 1000, remote)
                if self._fits_iteration_times:
                    self._iteration_times.add_prompt(in_flight.prompt_batch, tokens, ms)
                    in_flight.computed_tokens += tokens
                    if pick._decode_entry is not None:
                        pick.prompts_before = pick._decode_entry[1].computed_tokens
            elif not pick._is_counted:
                # Refused or cancelled: an engine that does not answer must not keep what it gets.
                for blocks, holder in pick._new_blocks:
                    self._selector.forget_prompt(blocks, holder)
            if pick.prefill is not None:
                in_flight.num_requests -= 1
            # If both phases end on one instance, its scores are updated once, below.
            if pick.prefill is not None or phase is _PREFILL_PHASE or pick._decode_entry is None:
                self._refresh_scores(instance, in_flight)
        entry = pick._decode_entry
        if entry is not None and phase is not _PREFILL_PHASE:
            pick._decode_entry = None
            instance, in_flight, tokens = entry
            in_flight.resident.remove(tokens)
            in_flight.num_requests -= 1
            if self._tracks_decoding:
                self._remove_decoding(pick, in_flight)
            self._refresh_scores(instance, in_flight)

    def observe_completion(self, pick: Pick, output_tokens: int) -> None:
        """A request completed with so many output tokens; called before its release."""
        self._num_completed += 1
        # Lengths change slowly: after the first completions a sample is enough.
        if self._num_completed < _ALWAYS_OBSERVED or self._num_completed % _OBSERVE_EVERY == 0:
            self.length_predictor.observe(pick.prompt_tokens, output_tokens)
        entry = pick._decode_entry
        if self.uses_prompt_text and entry is not None:
            self._count_output(pick, output_tokens)
        if self._fits_iteration_times and entry is not None and pick.decoding_since is not None:
            _, in_flight, _ = entry
            now = self._clock()
            if (seconds := now - pick.decoding_since) > 0:
                prompts = in_flight.computed_tokens - pick.prompts_before
                mean = in_flight.compute_mean_decoding(pick.decoding_before, seconds, now)
                self._iteration_times.add_completion(output_tokens, seconds * 1e3, prompts, *mean)

    def allows_colocated(self, prefill_lost: bool) -> bool:
        """Whether the fallback policy lets one decode instance run both phases of a request."""
        if self._fallback is FallbackPolicy.ON_PREFILL_LOSS:
            return prefill_lost
        return self._fallback is FallbackPolicy.ALWAYS

    def explain_unavailable(self, model: str) -> str:
        """Why no instance can take a plain request for this model now; empty: one can."""
        served = self.registry.models.get(model)
        if served is None:
            return str(self.registry.build_error(model))
        try:
            request = RoutingRequest(1, 1.0)
            exclusions: list[Collection[str]] = [served.lacking]
            if self._select_pair(served, request, exclusions) is None:
                self._select_colocated(model, served, request, False, exclusions, False)
        except NoInstance as error:
            return str(error)
        return ""

    def _select(
        self,
        model: str,
        served: ServedModel,
        request: RoutingRequest,
        colocated: bool,
        exclusions: list[Collection[str]],
        prefill_lost: bool,
    ) -> Selection:
        selection = None
        if not colocated:
            if self._short_prompt_tokens:
                selection = self._select_short(served, request, exclusions)
            selection = selection or self._select_pair(served, request, exclusions)
        return selection or self._select_colocated(
            model, served, request, colocated, exclusions, prefill_lost
        )

    def _select_short(
        self, served: ServedModel, request: RoutingRequest, exclusions: list[Collection[str]]
    ) -> Selection | None:
        """A decode instance for a short or mostly cached prompt, if prefill takes longer."""
        limit = self._short_prompt_tokens
        uncached = request.prompt_tokens
        if request.blocks:
            uncached -= int(self._selector.count_most_cached(request))
        if uncached > limit:
            return None
        instance = self._find_colocated(served, "colocated", request, exclusions[:1])
        if instance is None or instance.connectivity is Connectivity.STALE:
            return None
        left = request.prompt_tokens - int(self._selector.count_cached(instance, request))
        queues = [
            table.pending_prompt.get_score(slot)
            for table in served.score_tables
            if (slot := table.prefill.find_least()) != NONE
        ]
        queue = min(queues, default=math.inf)
        if not dispatch.computes_short(left, instance.in_flight.prompt.pending, queue, limit):
            return None
        return None, instance, "short-prompt"

    def _select_pair(
        self, served: ServedModel, request: RoutingRequest, exclusions: list[Collection[str]]
    ) -> Selection | None:
        """A pair, or a mixed instance, with the first of `exclusions` that leaves any."""
        for excluded in exclusions:
            selection = self._select_pair_excluding(served, request, excluded)
            if selection is not None:
                return selection
        return None

    def _select_pair_excluding(
        self, served: ServedModel, request: RoutingRequest, excluded: Collection[str]
    ) -> Selection | None:
        """The pair of the table with the least work in both phases, without stale ones if possible.
        During a rollout a model has a table per revision. Counting both phases sends each revision
        about as much as its scarcer phase can serve; equal ones alternate."""
        best: tuple[float, ScoreTable, int, int] | None = None
        for table in served.score_tables:
            closed = find_slots(table, excluded) if excluded else []
            first, second = self._selector.select_pair(table, closed, request)
            if second == NONE:
                continue
            if len(served.score_tables) == 1:
                best = 0.0, table, first, second
                break
            prefill = second if first == NONE else first
            pending = table.pending_prompt.get_score(prefill)
            if request.known:
                pending -= self._selector.count_cached(table.instances[prefill], request)
            backlog = dispatch.measure_backlog(
                pending,
                table.instances[second].in_flight.resident.pending,
                table.instances[prefill].in_flight.last_pick,
            )
            if first != NONE and table.decode.get_score(second) >= STALE_PENALTY:
                backlog += STALE_PENALTY
            if best is None or backlog < best[0]:
                best = backlog, table, first, second
        if best is None:
            return None
        _, table, first, second = best
        if first == NONE:
            return None, table.instances[second], "mixed"
        cells = table.cells
        crosses = cells is not None and cells[first] != cells[second]
        reason = "cross-cell" if crosses else "disaggregated"
        return table.instances[first], table.instances[second], reason

    def _select_colocated(
        self,
        model: str,
        served: ServedModel,
        request: RoutingRequest,
        colocated: bool,
        exclusions: list[Collection[str]],
        prefill_lost: bool,
    ) -> Selection:
        if colocated or self.allows_colocated(prefill_lost):
            instance = self._find_colocated(served, "colocated", request, exclusions)
            if instance is not None:
                return None, instance, "single-instance" if colocated else "no-prefill"
        if self._fallback is FallbackPolicy.ALWAYS:
            instance = self._find_colocated(served, "spare", request, exclusions)
            if instance is not None:
                return None, instance, "no-decode"
        closed = sum(table.closed_pairs.count for table in served.score_tables)
        raise NoInstance(
            describe_unavailable(
                model,
                served.instances,
                colocated=colocated,
                lacking=served.lacking,
                excluded=exclusions[-1],
                closed=closed,
            )
        )

    def _find_colocated(
        self,
        served: ServedModel,
        use: str,
        request: RoutingRequest,
        exclusions: list[Collection[str]],
    ) -> RoutedInstance | None:
        """The best instance in column `use`, with the first of `exclusions` that leaves any."""
        for excluded in exclusions:
            best: tuple[float, RoutedInstance] | None = None
            for table in served.score_tables:
                column: WritableScoreColumn = getattr(table, use)
                closed, scores = find_slots(table, excluded), column.to_array()
                if closed:
                    scores = dispatch.close_slots(scores, closed)
                slot = self._selector.find_slot(table, scores, TO_WHOLE, request)
                if slot == NONE:
                    continue
                score, instance = float(scores[slot]), table.instances[slot]
                if request.known:
                    score -= self._selector.count_cached(instance, request)
                if best is None or score < best[0]:
                    best = score, instance
            if best is not None:
                return best[1]
        return None

    def _add_load(
        self,
        pick: Pick,
        prefill: RoutedInstance | None,
        decode: RoutedInstance,
        request: RoutingRequest,
    ) -> None:
        self._num_picks = self._count_pick()
        first = decode if prefill is None else prefill
        first.in_flight.last_pick = decode.in_flight.last_pick = self._num_picks
        prefill_load, uncached = first.in_flight, float(request.prompt_tokens)
        if request.blocks or request.cached is not None:
            uncached = self._record_prompt(pick, first, decode, request)
        if prefill_load.prompt.pending < 1.0:
            prefill_load.queue.head_started_ms = self._clock() * 1000
        prefill_load.prompt.add(uncached)
        prefill_load.num_prompts += 1
        pick._prefill_entry = (first, prefill_load, uncached)
        resident = pick.prompt_tokens + pick.output_tokens
        in_flight = decode.in_flight
        in_flight.resident.add(resident)
        in_flight.num_requests += 1
        if self._tracks_decoding:
            in_flight.decoding_requests[pick] = None
            in_flight.weighted_context += _compute_weight(pick)
            in_flight.num_heavy += pick.output_tokens > dispatch.HEAVY_OUTPUT_TOKENS
        pick._decode_entry = (decode, in_flight, resident)
        self.registry.refresh(decode)
        if prefill is not None:
            prefill.in_flight.num_requests += 1
            self.registry.refresh(prefill)

    def _record_prompt(
        self, pick: Pick, first: RoutedInstance, decode: RoutedInstance, request: RoutingRequest
    ) -> float:
        """Record where a prompt will be cached; returns how many of its tokens are computed."""
        selector, prompt = self._selector, float(request.prompt_tokens)
        pick.predicted_cached = predicted = selector.predict_cached(first, request)
        cached = selector.correct(first, request, predicted)
        if request.blocks:
            pick._is_looked_up = True
            pick.predicted_loaded = selector.predict_loaded(request)
            selector.observe_cached(prompt, cached)
            if first is not decode and request.known:
                source, most = selector.choose_source(first, request, cached)
                if source is not None:
                    pick.source, pick._pulled, cached = source.target, most - cached, most
            new = selector.record_prompt(first, request)
            if new:
                pick._new_blocks = ((new, first.target.holder),)
            is_of_interest = self._short_prompt_tokens or decode.target.prefix_port
            if is_of_interest and first is not decode:
                # What a decode instance has cached: for short prompts, and for others to pull it.
                new = selector.record_prompt(decode, request)
                pick._new_blocks += ((new, decode.target.holder),)
            if self._num_picks % _PRUNE_EVERY == 0:
                instances = self.registry.instances.values()
                selector.retain_boots({each.target.boot_id for each in instances})
        return prompt - cached

    def _count_computed(
        self, pick: Pick, instance: RoutedInstance, in_flight: InFlightLoad, uncached: float
    ) -> None:
        """A prompt was computed: only such ones fill caches, and are compared with what engines
        report. Refused and cancelled ones do neither."""
        if pick._is_counted:
            return
        pick._is_counted = True
        tokens = float(pick.prompt_tokens)
        looked_up = tokens if pick._is_looked_up else 0.0
        in_flight.count_prompt(tokens, looked_up, pick.predicted_cached)
        written = uncached + pick._pulled
        if pick.predicted_loaded:
            in_flight.count_loaded(pick.predicted_loaded)
            written += pick.predicted_loaded * instance.hits.trust
        in_flight.count_written(min(written, float(instance.max_prompt_tokens)))

    def _count_output(self, pick: Pick, output_tokens: int) -> None:
        """A request has ended: its output is in the KV of the instance that decoded it, with the
        prompt if that was computed elsewhere."""
        computed, decoded = pick._prefill_entry, pick._decode_entry
        if computed is not None:
            # Its response was not streamed.
            self._count_computed(pick, *computed)
        if decoded is not None:
            instance, in_flight, _ = decoded
            written = output_tokens + (pick.prompt_tokens if pick.prefill is not None else 0)
            in_flight.count_written(float(min(written, instance.max_prompt_tokens)))

    def _remove_decoding(self, pick: Pick, in_flight: InFlightLoad) -> None:
        del in_flight.decoding_requests[pick]
        weight = _compute_weight(pick)
        in_flight.weighted_context -= weight
        if self._fits_iteration_times and pick.decoding_since is not None:
            in_flight.change_decoding(-1, -weight, self._clock())
        in_flight.num_heavy -= pick.output_tokens > dispatch.HEAVY_OUTPUT_TOKENS

    def _refresh_scores(self, instance: RoutedInstance, in_flight: InFlightLoad) -> None:
        if instance.in_flight is in_flight:
            self.registry.refresh(instance)


class SharedRouter(Router):
    """A router that shares load accounting with other processes.

    What is hard: processes that pick at the same time read the same scores and select the same
    instance, where one request waits behind the other although another instance is idle. That is
    rare but, with many instances, costly (benchmarks/dispatch, processes). So after a selection
    each process checks whether another one was faster, and if so selects again.
    """

    def _select(
        self,
        model: str,
        served: ServedModel,
        request: RoutingRequest,
        colocated: bool,
        exclusions: list[Collection[str]],
        prefill_lost: bool,
    ) -> Selection:
        for _ in range(_MAX_ATTEMPTS):
            for table in served.score_tables:
                table.refresh()
            selection = super()._select(model, served, request, colocated, exclusions, prefill_lost)
            first = selection[0] or selection[1]
            chosen = first.score_table
            if not (isinstance(chosen, ChangeLogScoreTable) and chosen.has_lost_race(first.slot)):
                break
        return selection


def _compute_weight(pick: Pick) -> float:
    return compute_context_weight(pick.prompt_tokens, pick.output_tokens, GAMMA)
