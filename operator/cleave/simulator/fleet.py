"""The simulated fleet: instances, their batching, and how requests and KV reach them."""

import math
from dataclasses import dataclass
from enum import IntEnum

from cleave.api.enums import DispatchPolicy as DispatchPolicy
from cleave.perf.timing import EngineTiming
from cleave.policy.admission import Admission as Admission
from cleave.policy.best_fit import BestFitModel as BestFitModel
from cleave.policy.prompt_order import PrefillOrder as PrefillOrder
from cleave.policy.role_flipping import FlipThresholds as FlipThresholds


class CacheView(IntEnum):
    """What dispatch by PREFIX_AWARE knows of the engines' prefix caches."""

    NOTHING = 0
    """Every prompt counts as new."""
    SENT = 1
    """The prompts that were sent to each instance, as in the router."""
    CACHED = 2
    """What each engine caches now, and prompts on their way there: the best that the engines' cache
    events could yield."""


class Batching(IntEnum):
    """How an instance forms its next iteration (Vidur, section 4.5, and current vLLM)."""

    VLLM = 0
    """vLLM v1 and Sarathi-Serve: decoding requests first, then prompt chunks, under one token
    budget (`max_num_batched_tokens`). On a prefill instance this is TetriInfer's chunked prefill
    (section 3.3.3) with its ChunkSize as the budget."""
    PREFILL_FIRST = 1
    """vLLM as published (SOSP'23): waiting unchunked prompts run before decoding requests. On a
    prefill instance this is DistServe's batching near L_m (section 4.3): prompts are batched while
    their sum stays within `max_num_batched_tokens`; a longer one runs alone."""
    ORCA = 2
    """Iteration-level batches of unchunked prompts and decoding requests; KV is reserved for the
    longest possible request (OSDI'22)."""
    ORCA_PAGED = 3
    """Orca+ of Vidur's section 7.3: Orca's batches over paged KV."""
    FASTER_TRANSFORMER = 4
    """Request-level batches: no request joins a batch until its last request has ended. Requests
    leave as they end; KV is reserved as for Orca."""
    LIGHTLLM = 5
    """Prefill first; requests are admitted if the batch's future KV peak fits."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One kind of engine: an instance, or each of the data-parallel ranks of one.

    Ranks compute in step, as those of a model with experts do: an iteration of all begins when the
    one before has ended on all, and takes as long as the longest of them; a rank without requests
    computes an empty one. For dispatch, memory and results each rank is an instance.

    With pipeline stages there are as many micro-batches as stages. A request stays in the
    micro-batch that it joins; each forms its next iteration when its last one ended, as in
    vLLM.
    """

    timing: EngineTiming
    """Latency model of iterations; `timing.stages` is the pipeline parallel size."""
    kv_capacity_tokens: int
    """Tokens of KV that fit, rounded down to full blocks."""
    kv_block_size: int = 16
    batching: Batching = Batching.VLLM
    max_num_seqs: int = 256
    """Most requests in one iteration; with pipeline stages: in all micro-batches together."""
    max_num_batched_tokens: int = 8192
    """Most tokens of one iteration: vLLM's budget, Sarathi's chunk, DistServe's L_m."""
    order: PrefillOrder = PrefillOrder.FCFS
    prefill_sched_batch: int = 16
    """Waiting prompts that SJF and LJF sort at a time, against starvation."""
    admission: Admission = Admission.GREEDY
    ttft_ms: float = math.inf
    """Target of PrefillOrder.IN_TIME."""
    tpot_ms: float = math.inf
    """Target of Admission.WITHIN_TPOT; with IN_TIME also the time that a decode instance takes for
    a first token."""
    max_model_len: int | None = None
    """Prompt plus output for which ORCA and FASTER_TRANSFORMER reserve KV; None: the longest."""
    ranks: int = 1
    """Data-parallel ranks of one instance; above 1 only with one pipeline stage."""
    host_capacity_tokens: int = 0
    """Tokens of KV that fit in its host memory (`policy.host_memory`), rounded down to full blocks;
    only with VLLM. Matters only with a trace whose prompts repeat."""
    host_token_ms: float = 0.0
    """ms to copy one token back from there."""
    prefix_caching: bool = True
    """Whether computed KV is found again until it is overwritten, as in vLLM; not where KV is
    reserved (ORCA, FASTER_TRANSFORMER)."""


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Equal instances."""

    engine: SimulatedEngine
    replicas: int

    @property
    def engines(self) -> int:
        """Engines of all instances: their data-parallel ranks count one by one."""
        return self.replicas * self.engine.ranks


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """Transfer of one request's KV to its decode instance, which pulls it.

    It takes `latency_ms + tokens * token_ms`, of which `overlapped_token_ms * tokens` overlap with
    the prompt's computation (per layer: Splitwise, section IV-C). `tokens` is rounded up to full
    blocks of the prefill instance. Transfers of one prefill instance share its link, first come
    first served; its KV blocks are held until the pull ends. The decode instance reserves blocks
    when the request is at the head of its queue, and the request joins the batch after the pull;
    both happen between two iterations.
    """

    latency_ms: float = 0.0
    token_ms: float = 0.0
    overlapped_token_ms: float = 0.0
    overlap_from_tokens: int = 1 << 40
    """Prompts at least this long are sent per layer, shorter ones after the prompt."""
    is_shared: bool = True
    """False: every transfer has the full bandwidth of the link, as in the emulated engine."""
    receiver_ms: float = 0.0
    """ms by which one or more pulls lengthen the decode instance's iteration that starts with them:
    its cores issue the transfers, or copy, instead of computing. 0 if transfers run beside
    computation, as on GPUs."""
    receiver_token_ms: float = 0.0
    """The same per pulled token."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """All instances that serve one model, and how requests reach them.

    Prefill pools alone: requests end with their first token (DistServe's simu_prefill). Decode
    pools alone: requests arrive with their prompt computed (simu_decode). Otherwise both phases are
    simulated: on mixed instances, or on prefill and decode instances with a handoff.
    """

    prefill: tuple[SimulatedPool, ...] = ()
    decode: tuple[SimulatedPool, ...] = ()
    mixed: tuple[SimulatedPool, ...] = ()
    transfer: SimulatedTransfer = SimulatedTransfer()
    dispatch: DispatchPolicy = DispatchPolicy.PREFIX_AWARE
    """The router's policy."""
    cache_view: CacheView = CacheView.SENT
    """Matters only with a trace whose prompts repeat (`Trace.blocks`)."""
    has_connector: bool = True
    """Whether engines have a KV connector, as all that Cleave starts have, mixed ones too. Those
    that schedule ahead then keep the blocks of a request whose iteration runs (vLLM's
    `defer_block_free`)."""
    pulls_prefixes: bool = False
    """Whether a prefill instance pulls a prompt's beginning from the cache of another prefill or
    decode instance where that is faster than computing it (`policy.prefix_pull`), like a handoff.
    Matters only where dispatch knows of caches."""
    defers_dispatch: bool = False
    """True: deferred binding (Vidur, section 4.5) replaces `dispatch`: requests and handoffs wait
    in central queues, first come first served, until an instance has room between two iterations.
    """
    dispatch_ms: float = 0.0
    """Latency from client to instance, added before the prompt and again before the pull."""
    best_fit: BestFitModel | None = None
    """Parameters of BEST_FIT; required for it, else unused."""
    short_prompt_tokens: int = 0
    """Prompts of up to this many tokens are computed on the decode instance while every prefill
    instance has more waiting tokens; 0: none."""
    flipping: FlipThresholds | None = None
    """Thresholds of the pool manager, which checks once a second; None: roles do not change."""
    first_token_by_decode: bool = True
    """True: the decode instance produces the first token, after the pull and one decode iteration,
    as in vLLM and Cleave. False: the prefill instance does, as in the DistServe paper."""
