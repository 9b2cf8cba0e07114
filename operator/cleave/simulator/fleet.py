"""What is simulated: instances, how each batches, and how requests reach them."""

from dataclasses import dataclass
from enum import IntEnum

from cleave.api.enums import DispatchPolicy as DispatchPolicy
from cleave.perf.timing import EngineTiming
from cleave.policy.admission import Admission as Admission
from cleave.policy.best_fit import BestFitModel as BestFitModel
from cleave.policy.prompt_order import PrefillOrder as PrefillOrder
from cleave.policy.role_flipping import FlipThresholds as FlipThresholds


class Batching(IntEnum):
    """How an instance forms its next pass (Vidur, section 4.5, and what vLLM does today)."""

    VLLM = 0
    """vLLM v1 and Sarathi-Serve: decoding requests first, then prompt chunks, under one token
    budget (`max_num_batched_tokens`); prompts are cut to fit. On a prefill instance this is
    TetriInfer's chunked prefill (section 3.3.3) with its ChunkSize as the budget."""
    PREFILL_FIRST = 1
    """vLLM as published: waiting whole prompts run before anything decodes (SOSP'23). On a prefill
    instance this is DistServe's batching near L_m (section 4.3): prompts are joined while their sum
    stays within `max_num_batched_tokens`; a longer one runs alone."""
    ORCA = 2
    """Iteration-level batches of whole prompts and decoding requests together, without a cut; KV
    is reserved for the longest possible request (OSDI'22)."""
    ORCA_PAGED = 3
    """Orca+ of Vidur's section 7.3: Orca's batches over paged KV."""
    FASTER_TRANSFORMER = 4
    """Request-level batches: nothing joins a batch until its last request has ended. Requests
    leave as they end; KV is reserved as for Orca."""
    LIGHTLLM = 5
    """Prefill first, admitting only what fits at the batch's future peak of KV."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One kind of instance.

    With pipeline stages there are as many micro-batches as stages. Requests stay in the one that
    they join; each forms its next iteration when its last one is through, as vLLM's do.
    """

    timing: EngineTiming
    """Of its iterations; `timing.stages` is the pipeline parallel size."""
    kv_capacity_tokens: int
    """Tokens of KV that fit, whole blocks."""
    kv_block_size: int = 16
    batching: Batching = Batching.VLLM
    max_num_seqs: int = 256
    """Most requests in one pass; with pipeline stages: in all micro-batches together."""
    max_num_batched_tokens: int = 8192
    """Most tokens of one pass: vLLM's budget, Sarathi's chunk, DistServe's L_m."""
    order: PrefillOrder = PrefillOrder.FCFS
    prefill_sched_batch: int = 16
    """Waiting prompts that SJF and LJF sort at a time, against starvation."""
    admission: Admission = Admission.GREEDY
    max_model_len: int | None = None
    """Longest prompt and output, for which ORCA and FASTER_TRANSFORMER reserve KV; None: the
    longest of the trace."""


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Instances that are alike."""

    engine: SimulatedEngine
    replicas: int


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """Moving the KV of one request to its decode instance; the decode side pulls.

    `latency_ms + tokens * token_ms`, of which `overlapped_token_ms * tokens` happen while the
    prompt still runs (per layer: Splitwise, section IV-C). Whole blocks of the prefill instance are
    moved. One prefill instance's transfers share its link, first come first served; its KV blocks
    are held until the pull ends. The decode instance reserves its own before, between two
    iterations, when the request's turn comes; what has been pulled joins between
    two iterations as well.
    """

    latency_ms: float = 0.0
    token_ms: float = 0.0
    overlapped_token_ms: float = 0.0
    overlap_from_tokens: int = 1 << 40
    """Prompts at least this long are sent per layer, shorter ones serialised."""
    is_shared: bool = True
    """False: every transfer has the whole link to itself, as the emulated engine does."""
    receiver_ms: float = 0.0
    """By which pulls, one or several, lengthen the pass of the decode instance that begins with
    them: its cores issue the transfers, or even copy, instead of computing. 0 where that is done
    beside them, as on GPUs."""
    receiver_token_ms: float = 0.0
    """The same per token that is pulled."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Everything that serves one model.

    Prefill pools alone: requests end with their first token (DistServe's simu_prefill). Decode
    pools alone: requests arrive with their prompt computed (simu_decode). Otherwise both phases are
    simulated: on mixed instances, or on prefill and decode instances with the hand-off between.
    """

    prefill: tuple[SimulatedPool, ...] = ()
    decode: tuple[SimulatedPool, ...] = ()
    mixed: tuple[SimulatedPool, ...] = ()
    transfer: SimulatedTransfer = SimulatedTransfer()
    dispatch: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT
    """As the router dispatches. PREFIX_AWARE finds nothing cached: a trace holds no text."""
    defers_dispatch: bool = False
    """Deferred binding (Vidur, section 4.5) instead: requests wait centrally, and so do hand-offs,
    first come first served, until an instance between two iterations has room for them."""
    dispatch_ms: float = 0.0
    """Client to instance: paid before the prompt runs, and again before a hand-off is pulled."""
    best_fit: BestFitModel | None = None
    """What BEST_FIT promises; needed by it alone."""
    short_prompt_tokens: int = 0
    """Prompts up to so long are computed by the decode instance itself while every prefill instance
    has more to do; 0: none."""
    flipping: FlipThresholds | None = None
    """What the pool manager goes by, which looks once a second; None: roles stay as they are."""
    first_token_by_decode: bool = True
    """True: the client's first token comes from the decode instance, after the pull and one decode
    pass, as in vLLM and Cleave. False: from the prefill instance, as the DistServe paper counts."""
