"""One instance in the router: its registration, its load, whether it takes requests.

Used by the registry (which updates it) and the score table (which scores it). What is hard: load
accounting belongs to one boot of an engine. After a restart the old requests are gone, but their
picks are released later; so the `InFlightLoad` is replaced, never reset, and late releases go to
the old one.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from cleave.policy.cache_horizon import UNKNOWN, find_horizon, record_clock, start_history
from cleave.policy.host_memory import estimate_load_token_ms
from cleave.policy.prefix_cache import CLOCK_TOKENS
from cleave.policy.queue_model import OutstandingTokens, PrefillQueueModel, estimate_pending
from cleave.router.cache_hits import HitCounts, HitWindow
from cleave.router.iteration_time_fit import PromptBatch
from cleave.router.pair_proofs import PairResult, merge_results, read_proofs
from cleave.router.prefix_index import to_holder
from cleave.rpc.engine_key import compute_kv_key
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2

ROLES = (agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED)
"""The roles that this version knows, numbered in this order by `policy.role_flipping`. Agents of a
newer version may report others."""
_UNKNOWN_KV_TOKENS = 1 << 17
"""Assumed size of a KV that an agent has not reported."""
STALL_NS = 10_000_000_000
"""An engine without a step for this long has stalled, and its KV leases may have expired: they last
20 s after a heartbeat, and heartbeats come every 5 s."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a picked phase runs; a snapshot that does not change with the instance."""

    instance: str
    host: str
    port: int
    engine_url: str
    boot_id: str
    epoch: int
    role: str = ""
    """prefill, decode or mixed: its role when it was picked."""
    kv_port: int = 0
    """Port of rank 0 for layer-wise KV transfer during prefill; 0: not supported."""
    overlap_min_tokens: int = 0
    """Prompt tokens from which layer-wise transfer is worthwhile; 0: the plan determines it."""
    prefix_port: int = 0
    """Port at which other engines can pull what it has cached; 0: nowhere."""

    holder: int = 0
    """Number of the boot in `router.prefix_index`."""

    revision: str = ""
    """Of its spec and its weights: with another one the same prompt has other tokens."""

    engine_key: str = field(default="", repr=False)
    """What the engine's HTTP API asks for; empty: nothing."""
    kv_key: str = field(default="", repr=False)
    """What its KV port asks for."""

    @property
    def endpoint(self) -> str:
        """`host:port` of the engine, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connectivity(enum.Enum):
    """State of the connection to an instance's agent."""

    FRESH = "fresh"
    """Connected, with recent events."""
    STALE = "stale"
    """Connected, no event for STALE_S: takes only requests that no other instance can take."""
    UNRESPONSIVE = "silent"
    """Connected, no event for SILENCE_S: takes no requests."""
    DISCONNECTED = "connection lost"
    """Not connected: takes no requests."""


class DecodingRequest(Protocol):
    """A request that decodes at an instance or will do so."""

    prompt_tokens: int
    output_tokens: float
    """Predicted output length."""
    decoding_since: float | None
    """Seconds of the router's clock; None: the prompt is not computed yet."""
    prompts_before: float
    """`InFlightLoad.computed_tokens` of its decode instance at that time."""


class InFlightLoad:
    """The load of one boot of an engine, from this gateway's requests and from load reports."""

    __slots__ = (
        "batch_s",
        "cached_tokens",
        "computed_tokens",
        "context_s",
        "decoding_changed_at",
        "decoding_context",
        "decoding_requests",
        "last_pick",
        "loaded_tokens",
        "looked_up_tokens",
        "num_decoding",
        "num_heavy",
        "num_prompts",
        "num_remote_requests",
        "num_requests",
        "prompt",
        "prompt_batch",
        "prompt_tokens",
        "queue",
        "resident",
        "weighted_context",
        "written_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt = OutstandingTokens()
        """Prompt tokens that are not computed yet."""
        self.computed_tokens = 0.0
        """Tokens of all own prompts computed so far; counted for BestFit only."""
        self.prompt_batch = PromptBatch()
        """For BestFit only."""
        self.queue = PrefillQueueModel()
        """Model of the progress of these prompts."""
        self.resident = OutstandingTokens()
        """Tokens that hold KV blocks of requests being decoded."""
        self.num_prompts = 0
        """Number of own requests whose prompt is not computed yet."""
        self.num_requests = 0
        """Number of own requests in either phase."""
        self.num_remote_requests = 0.0
        """Number of requests of other gateways, as of the last report."""
        self.num_heavy = 0
        """Number of decoding requests with long outputs."""
        self.weighted_context = 0.0
        """Sum of the contexts of decoding requests, weighted as in Aladdin."""
        self.decoding_requests: dict[DecodingRequest, None] = {}
        """Requests that decode there or will do so."""
        self.num_decoding = 0
        """Number of those whose prompt is computed; for BestFit only, as the following."""
        self.decoding_context = 0.0
        """Their part of `weighted_context`."""
        self.batch_s = self.context_s = 0.0
        """The integrals of both over time, up to their last change."""
        self.decoding_changed_at = 0.0
        """That change, in seconds of the router's clock."""
        self.last_pick = 0
        """Number of the latest pick of this instance."""
        self.prompt_tokens = 0.0
        """Tokens of all own prompts computed there since this boot."""
        self.looked_up_tokens = 0.0
        """Those of prompts whose blocks were looked up."""
        self.cached_tokens = 0.0
        """Those of them that were predicted to be cached there."""
        self.loaded_tokens = 0.0
        """Those of these that were predicted to be in host memory only."""
        self.written_tokens = 0.0
        """Tokens that own requests have written to its KV: its clock (`is_cached`)."""

    def count_prompt(self, prompt_tokens: float, looked_up: float, cached_tokens: float) -> None:
        """Count a prompt that was computed there: its tokens, those looked up (all or none), and
        how many of them were predicted to be cached."""
        self.prompt_tokens += prompt_tokens
        self.looked_up_tokens += looked_up
        self.cached_tokens += cached_tokens

    def count_loaded(self, tokens: float) -> None:
        """Count tokens of such a prompt that were predicted to be in host memory only."""
        self.loaded_tokens += tokens

    def count_written(self, tokens: float) -> None:
        """Count tokens that a request has written to the KV there: computed, pulled, copied back
        from host memory, or output."""
        self.written_tokens += tokens

    def read_clock(self) -> int:
        """The clock of its cache: tokens written by all processes, in units of CLOCK_TOKENS."""
        return int(self.written_tokens) // CLOCK_TOKENS

    def predict_hits(self) -> tuple[float, float, float]:
        """(prompt tokens that it has computed for all processes, those looked up, of these those
        predicted to be cached)."""
        return self.prompt_tokens, self.looked_up_tokens, self.cached_tokens

    def predict_loaded(self) -> float:
        """Those of the tokens predicted to be cached that were in host memory only."""
        return self.loaded_tokens

    def count_pending(self, prompts: bool = True) -> tuple[float, float, float]:
        """(pending prompt tokens, number of these prompts, resident tokens); the second one is 0
        unless `prompts` is true."""
        prompt = self.prompt.pending
        count = self.count_prompts(prompt) if prompts and prompt else 0.0
        return prompt, count, self.resident.pending

    def count_requests(self) -> int:
        """Number of requests of all processes that share this accounting."""
        return self.num_requests

    def count_decoding(self) -> float:
        """Number of requests, of all gateways and processes, that decode or will do so."""
        others = self.count_requests() - self.num_requests + self.num_remote_requests
        return len(self.decoding_requests) + others

    def count_others_tokens(self) -> float:
        """Tokens that hold KV blocks for requests of other gateways and processes."""
        return self.resident.pending - self.resident.own

    def measure_context(self) -> float:
        """Context of all these requests: own ones weighted as in Aladdin, others by tokens."""
        return self.weighted_context + self.count_others_tokens()

    def change_decoding(self, requests: int, context: float, now: float) -> tuple[float, float]:
        """One of its requests begins to decode (`requests`: 1), or ends (-1). Returns the integrals
        so far, for `compute_mean_decoding`."""
        self.batch_s, self.context_s = self.compute_decoding_integrals(now)
        self.decoding_changed_at = now
        self.num_decoding += requests
        self.decoding_context += context
        return self.batch_s, self.context_s

    def compute_decoding_integrals(self, now: float) -> tuple[float, float]:
        """The integrals over time of the number of requests that decode, and of their context."""
        elapsed = now - self.decoding_changed_at
        return (
            self.batch_s + self.num_decoding * elapsed,
            self.context_s + self.decoding_context * elapsed,
        )

    def compute_mean_decoding(
        self, before: tuple[float, float], seconds: float, now: float
    ) -> tuple[float, float]:
        """Mean number and context of the requests that decoded in the last `seconds`; `before`:
        the integrals at their begin. Of the requests of others that are there now, the same share
        counts as of own ones.

        What is there when a request ends scatters around its mean; fitted to that, iterations would
        seem to depend less on batch and context than they do.
        """
        own = len(self.decoding_requests)
        share = self.num_decoding / own if own else 1.0
        batch_s, context_s = self.compute_decoding_integrals(now)
        return (
            (batch_s - before[0]) / seconds + share * (self.count_decoding() - own),
            (context_s - before[1]) / seconds + share * self.count_others_tokens(),
        )

    def count_prompts(self, pending: float) -> float:
        """Number of prompts with `pending` tokens; other gateways' prompts have the mean length."""
        remote = pending - self.prompt.own
        return self.num_prompts + self.queue.count_prompts(remote) if remote else self.num_prompts

    def update_remote_requests(self, reported: int) -> None:
        """Include the number of requests that the instance reports."""
        self.num_remote_requests = estimate_pending(0.0, reported, self.count_requests())

    def publish(self) -> None:
        """Publish changes to the processes that share this accounting; this class has none."""

    def sync(self) -> None:
        """Publish changes and load those of other processes."""

    def close(self) -> None:
        """Close the accounting of a boot that has ended or whose instance is removed."""


class BaseScoreTable:
    """Base class of score tables. Not a Protocol: those are three times as slow when compiled."""

    __slots__ = ()

    def update(self, slot: int) -> None:
        """Recompute the scores of the instance on this slot."""
        raise NotImplementedError

    def update_uses(self, slot: int, before: Target) -> None:
        """Apply that the instance on this slot has opened, closed or changed its role or boot;
        `before`: its target before."""
        raise NotImplementedError


class RoutedInstance:
    """An instance with its latest registration, load report and load accounting."""

    __slots__ = (
        "_clock_history", "_open_load", "agent", "capacity", "closed_until", "connectivity", "hits",
        "horizon", "host_tokens", "in_flight", "kv_tokens", "last_event_at", "load",
        "load_token_ms", "max_prompt_tokens", "name", "num_routers", "pairs", "registration",
        "router_rank", "score_table", "slot", "stalled_at", "stepped_at", "target",
    )  # fmt: skip

    def __init__(
        self,
        agent: str,
        registration: agent_pb2.Registration,
        now: float,
        open_load: Callable[[str, str], InFlightLoad] = lambda name, boot_id: InFlightLoad(),  # noqa: ARG005
    ) -> None:
        """`open_load`: (instance name, boot ID) -> the accounting of that boot.
        Raises ValueError when the engine's URL is invalid."""
        self.target = to_target(registration)
        self.name = registration.instance
        """Unique in the fleet."""
        self.agent = agent
        self.registration = registration
        self.kv_tokens = _count_kv_tokens(registration)
        """Tokens that its KV holds."""
        self.max_prompt_tokens = _limit_prompt_tokens(registration, self.kv_tokens)
        """Most tokens that one request can write to its KV."""
        self.host_tokens = registration.host_kv_tokens
        """Tokens that its host memory for KV holds; 0: it has none, or its agent is older."""
        self.load_token_ms = estimate_load_token_ms(0.0, 0.0, registration.host_kv_token_ms)
        """ms to copy one token back from there."""
        self.load = agent_pb2.LoadReport()
        self._open_load = open_load
        self.in_flight = open_load(self.name, registration.boot_id)
        self._clock_history = start_history(now * 1000, float(self.in_flight.read_clock()))
        self.horizon = UNKNOWN
        """The clock of its cache before which it has evicted what it had, as of the last report."""
        self.hits = HitWindow()
        """What share of its prompts was cached."""
        self.pairs: dict[str, PairResult] = {}
        """Results of handoffs to this boot, by the boot of the prefill engine."""
        self.closed_until: dict[str, float] = {}
        """The end of those that close their pairs, in seconds of the registry's clock."""
        self.score_table: BaseScoreTable | None = None
        """The table with its scores; None after its removal."""
        self.slot = 0
        self.connectivity = Connectivity.FRESH
        self.last_event_at = now
        """Time of the latest event, in seconds of the registry's clock."""
        self.stalled_at = -math.inf
        """Time of the latest report after a stall (see STALL_NS), in seconds of the same clock."""
        self.stepped_at = -math.inf
        """Time of the latest report of a step of this boot's engine, by the same clock."""
        self.num_routers = 1
        """Number of routers that send requests to this instance."""
        self.capacity = self._share_kv()
        """What this gateway's prompts may fill of its KV, in units of CLOCK_TOKENS."""
        self.router_rank = 0
        """Rank of this router among them."""

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether enough KV blocks for a prompt are free, as of the last report."""
        return self.load.kv_blocks_free * self.registration.kv_block_size >= prompt_tokens

    @property
    def whole(self) -> str:
        """Name of the instance that it is a data-parallel rank of, which are named
        INSTANCE.rank-NUMBER; its own name if it is none."""
        is_rank = self.registration.data_parallel_size > 1
        return self.name.partition(".")[0] if is_rank else self.name

    @property
    def selectable(self) -> bool:
        """Whether new requests may be sent there."""
        return (
            self.connectivity in (Connectivity.FRESH, Connectivity.STALE)
            and self.registration.state == agent_pb2.STATE_READY
            and self.registration.role in ROLES
            and bool(self.target.boot_id and self.target.port)
        )

    def register(self, agent: str, registration: agent_pb2.Registration, now: float) -> None:
        """Apply a new registration; a new boot starts with empty load accounting.
        Raises ValueError when the engine's URL is invalid; then nothing is applied."""
        target = to_target(registration)
        if registration.boot_id != self.registration.boot_id:
            self.in_flight.close()
            self.in_flight = self._open_load(self.name, registration.boot_id)
            self._clock_history = start_history(now * 1000, float(self.in_flight.read_clock()))
            self.horizon = UNKNOWN
            self.hits = HitWindow()
            self.load = agent_pb2.LoadReport()
            self.stepped_at = -math.inf
            self.set_pairs({})
        self.agent = agent
        self.registration = registration
        self.kv_tokens = _count_kv_tokens(registration)
        self.capacity = self._share_kv()
        self.max_prompt_tokens = _limit_prompt_tokens(registration, self.kv_tokens)
        self.host_tokens = registration.host_kv_tokens
        self.load_token_ms = estimate_load_token_ms(0.0, 0.0, registration.host_kv_token_ms)
        self.target = target

    def update_pairs(self, proofs: agent_pb2.PairProofs, now: float) -> None:
        """Apply results of handoffs to this boot; those to another boot are ignored."""
        if proofs.boot_id == self.registration.boot_id:
            self.set_pairs(merge_results(self.pairs, read_proofs(proofs, now), now))

    def set_pairs(self, pairs: dict[str, PairResult]) -> None:
        """Replace the results of handoffs to this boot."""
        self.pairs = pairs
        ends = ((boot_id, each.closed_until) for boot_id, each in pairs.items())
        self.closed_until = {boot_id: end for boot_id, end in ends if end > -math.inf}

    def update_load(self, load: agent_pb2.LoadReport, now: float) -> bool:
        """Apply a load report; False when it belongs to another boot."""
        if load.boot_id != self.registration.boot_id:
            return False
        before = self.load
        is_late = load.sampled_ns - before.sampled_ns > STALL_NS
        if is_late and (before.num_running or before.num_waiting):
            self.stalled_at = now
        if load.sampled_ns > before.sampled_ns:
            self.stepped_at = now
        self.load = load
        self.num_routers, self.router_rank = max(load.num_routers, 1), load.router_rank
        self.capacity = self._share_kv()
        if self.in_flight.prompt.update_from_report(load.pending_prompt_tokens) < 0.5:
            # All waiting prompts belong to other routers; the start of the first one is not known.
            self.in_flight.queue.head_started_ms = now * 1000
        blocks = max(self.registration.kv_blocks_total - load.kv_blocks_free, 0)
        tokens = float(blocks * self.registration.kv_block_size)
        self.in_flight.resident.update_from_report(tokens)
        self.in_flight.update_remote_requests(load.num_running + load.num_waiting)
        self._update_horizon(float(load.oldest_kv_ms), now * 1000)
        if self.host_tokens:
            assumed_ms = self.registration.host_kv_token_ms
            hits, load_ms = float(load.host_kv_hits), load.host_kv_load_ms
            self.load_token_ms = estimate_load_token_ms(hits, load_ms, assumed_ms)
        # Agents of an older version do not report hits, which says nothing of the cache.
        if self.hits.is_due(now) and load.HasField("prefix_cache_queries"):
            queries, found = load.prefix_cache_queries, count_engine_hits(load)
            self.hits.update(HitCounts(now, *self.in_flight.predict_hits(), queries, found))
        return True

    def _share_kv(self) -> float:
        return float(self.kv_tokens) / float(CLOCK_TOKENS * self.num_routers)

    def _update_horizon(self, oldest_ms: float, now_ms: float) -> None:
        """Follow the latest report alone, so that a late one is wrong until the next one only."""
        # Others hold little beside what is cached, and where prefill instances were believed to
        # have evicted a session, it would give up its home for a queue that is a bit shorter.
        in_flight = self.in_flight
        begin_ms = now_ms + in_flight.prompt.pending * in_flight.queue.upper_token_ms
        record_clock(self._clock_history, begin_ms, float(in_flight.read_clock()), self.capacity)
        self.horizon = UNKNOWN
        if oldest_ms and self.registration.role == agent_pb2.ROLE_MIXED:
            self.horizon = find_horizon(self._clock_history, now_ms - oldest_ms)


def count_engine_hits(load: agent_pb2.LoadReport) -> int:
    """Prompt tokens that an engine had, on its GPU or in host memory, as it reports."""
    return load.prefix_cache_hits + load.host_kv_hits


def _count_kv_tokens(registration: agent_pb2.Registration) -> int:
    return registration.kv_blocks_total * registration.kv_block_size or _UNKNOWN_KV_TOKENS


def _limit_prompt_tokens(registration: agent_pb2.Registration, kv_tokens: int) -> int:
    return min(registration.max_model_len or kv_tokens, kv_tokens)


def to_target(registration: agent_pb2.Registration) -> Target:
    """The address of an engine; port 0: not known yet. Raises ValueError if its URL is invalid."""
    parts = urlsplit(registration.engine_url)
    return Target(
        instance=registration.instance,
        host=parts.hostname or "",
        port=parts.port or 0,
        engine_url=registration.engine_url,
        boot_id=registration.boot_id,
        epoch=registration.epoch,
        role=get_enum_name(agent_pb2.Role, registration.role),
        kv_port=registration.kv_port,
        overlap_min_tokens=registration.ahead_from_tokens,
        prefix_port=registration.prefix_port,
        holder=to_holder(registration.boot_id),
        revision=registration.revision,
        engine_key=registration.engine_key,
        kv_key=compute_kv_key(registration.engine_key),
    )
