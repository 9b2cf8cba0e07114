"""The scheduler side of the connector: which prompts are leased, pulled or declined.

Runs in vLLM's scheduler, between steps. A finished prefill keeps its blocks until a decode engine
with free blocks has pulled them, or the lease ends; so prefill memory is the queue between the two.
vLLM reports the end of a request in several ways, and each of them must free the blocks on the
other side.

Consumers may pull a prefill while it runs (`InFlightPrefills`). A block is final when the step that
fills it has ended, not when it is in the prefix cache. vLLM enters blocks there before they are
computed, so that two requests of one step can share them. Blocks that a step finds there count as
computed in it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from cleave_worker.transfer.block_leases import FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.handoff import Handoff, RefusalReason, compute_prompt_digest
from cleave_worker.transfer.sharding import ParallelShape
from cleave_worker.vllm.kv.metadata import CleaveConnectorMetadata, ComputedChunk, PullTask
from cleave_worker.vllm.kv.metrics import KvTransferStats

PARAMS_KEY = "cleave"
"""Key of a handoff in vLLM's kv_transfer_params."""
FinishResult = tuple[bool, dict[str, object] | None]
"""Whether the blocks of a finished request stay leased, and the handoff."""
_SUCCESS_STATUSES = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """The handoffs of one engine."""

    def __init__(
        self, boot_id: str, block_size: int, shape: ParallelShape, kv_key: str = ""
    ) -> None:
        """`shape`: parallelism of this engine. `kv_key`: what its KV port asks for."""
        self._kv_key = kv_key
        self._boot_id = boot_id
        self._block_size = block_size
        self._shape = shape
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._epochs = itertools.count(1)
        self._in_flight = InFlightPrefills(block_size)
        self._incoming: dict[str, Handoff] = {}
        self._metadata = CleaveConnectorMetadata()
        self._stats = KvTransferStats()

    def set_rank_addresses(
        self, addresses: tuple[tuple[str, int], ...], prefix_secret: str = ""
    ) -> None:
        """Set the address of each rank, in the order of ranks, once all have started. Ranks receive
        it, too: a consumer of an overlapped prefill knows only rank 0. `prefix_secret`: what signs
        leases of cached blocks; empty: none are leased."""
        self._addresses = self._metadata.addresses = addresses
        self._metadata.prefix_secret = prefix_secret

    def on_new_request(self, request: Request) -> None:
        """Read the handoff of a decode request; its lease is extended until it is pulled. For a
        prefill request, read the name under which consumers may pull it while it runs."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self._begin_prefill(request, params)
            return
        if not params or not params.get("do_remote_prefill"):
            return
        handoff = _parse_handoff(params)
        if (
            handoff is None
            or (not handoff.is_overlapped and handoff.num_tokens < request.num_prompt_tokens)
            or request.prompt_token_ids is None
        ):
            params["do_remote_prefill"] = False
            self._stats.record_refusal(RefusalReason.MALFORMED)
            return
        self._incoming[request.request_id] = handoff
        self._metadata.expected_pulls[request.request_id] = handoff

    def count_tokens_to_pull(self, request: Request, num_computed_tokens: int) -> int:
        """Return the tokens of the prompt that are not in the prefix cache."""
        if request.request_id not in self._incoming:
            return 0
        return max(0, int(request.num_prompt_tokens) - num_computed_tokens)

    def update_after_alloc(
        self, request: Request, blocks: list[Any], num_external_tokens: int
    ) -> None:
        """Pull into the request's allocated blocks beyond those of the prefix cache."""
        handoff = self._incoming.pop(request.request_id, None)
        if handoff is None:
            return
        # Only once: if the pull fails, the prompt is computed here.
        request.kv_transfer_params["do_remote_prefill"] = False
        if not num_external_tokens:
            self._metadata.declined_pulls[request.request_id] = handoff
            return
        first = (request.num_prompt_tokens - num_external_tokens) // self._block_size
        local = tuple(block.block_id for block in blocks[first : self._count_blocks(request)])
        task = PullTask(handoff, _compute_digest(request), first, local)
        self._metadata.pulls[request.request_id] = task

    def finish_request(self, request: Request, block_ids: list[int]) -> FinishResult:
        """End a request; its handoff is for the response."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        handoff = self._incoming.pop(request.request_id, None)
        if handoff is not None:
            # The request ended while it was queued.
            self._metadata.declined_pulls[request.request_id] = handoff
        num_blocks = self._count_blocks(request)
        started = self._in_flight.end(request.request_id)
        if (
            not params.get("do_remote_decode")
            or request.status not in _SUCCESS_STATUSES
            or len(block_ids) < num_blocks
            # A prompt of embeddings has no tokens that identify it.
            or request.prompt_token_ids is None
            # Its layerwise consumer was refused, and no other consumer has its name.
            or (started is None and _get_prefill_name(params))
        ):
            if started:
                self._metadata.cancelled_prefills.add(request.request_id)
            return False, None
        epoch = started.epoch if started else next(self._epochs)
        prefill = FinishedPrefill(epoch, _compute_digest(request), tuple(block_ids[:num_blocks]))
        self._metadata.finished_prefills[request.request_id] = prefill
        return True, self._build_params(request, prefill)

    def build_metadata(self, output: SchedulerOutput | None = None) -> CleaveConnectorMetadata:
        """Return the changes since the last step, and the work of the next step (`output`)."""
        metadata, self._metadata = self._metadata, CleaveConnectorMetadata()
        if output is not None:
            metadata.computed_chunks, preempted = self._in_flight.advance(output)
            metadata.cancelled_prefills |= preempted
        return metadata

    def take_stats(self) -> KvTransferStats:
        """Return the refusals of the scheduler side since the last step."""
        return self._stats.clone_and_reset()

    def _begin_prefill(self, request: Request, params: dict[str, Any]) -> None:
        name = _get_prefill_name(params)
        if not name or request.prompt_token_ids is None:
            return
        prefill = PrefillInProgress(
            next(self._epochs), _compute_digest(request), self._count_blocks(request), name
        )
        self._in_flight.begin(request.request_id, prefill, request.num_prompt_tokens)
        self._metadata.started_prefills[request.request_id] = prefill

    def _count_blocks(self, request: Request) -> int:
        return int(-(-request.num_prompt_tokens // self._block_size))

    def _build_params(self, request: Request, prefill: FinishedPrefill) -> dict[str, object]:
        handoff = Handoff(
            self._boot_id,
            request.request_id,
            prefill.epoch,
            prefill.prompt_digest,
            request.num_prompt_tokens,
            self._addresses,
            self._shape,
            self._kv_key,
        )
        # As vLLM's NixlConnector writes it, for readers of any connector's handoffs.
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(prefill.blocks)],
            "remote_engine_id": self._boot_id,
            "remote_request_id": request.request_id,
            "remote_host": self._addresses[0][0],
            "remote_port": self._addresses[0][1],
            "tp_size": self._shape.tensor_parallel_size,
            "pp_size": len(self._shape.stages),
            "remote_num_tokens": request.num_prompt_tokens,
            "transfer_mode": "pull",
            PARAMS_KEY: msgspec.to_builtins(handoff),
        }


def _get_prefill_name(params: dict[str, Any]) -> str:
    """Return the name under which a prefill may be pulled; empty when it may not."""
    handoff = params.get(PARAMS_KEY)
    name = handoff.get("name") if isinstance(handoff, dict) else None
    return name if isinstance(name, str) else ""


def _parse_handoff(params: dict[str, Any]) -> Handoff | None:
    try:
        handoff = msgspec.convert(params.get(PARAMS_KEY), Handoff)
    except msgspec.ValidationError:
        return None
    identity = (params.get("remote_engine_id"), params.get("remote_request_id"))
    # vLLM's fields and ours must be of one handoff.
    return handoff if identity == (handoff.boot_id, handoff.request_id) else None


@dataclass(slots=True)
class _TrackedPrefill:
    prefill: PrefillInProgress
    num_tokens: int
    blocks: tuple[int, ...] = ()
    num_final: int = 0


class InFlightPrefills:
    """Tracked prefills by request id; preempted ones are forgotten, as vLLM frees their blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefills: dict[str, _TrackedPrefill] = {}

    def begin(self, request_id: str, prefill: PrefillInProgress, num_tokens: int) -> None:
        """Track a prefill whose prompt has `num_tokens` tokens."""
        self._prefills[request_id] = _TrackedPrefill(prefill, num_tokens)

    def end(self, request_id: str) -> PrefillInProgress | None:
        """End a prefill; returns None when it was not tracked or has been preempted."""
        tracked = self._prefills.pop(request_id, None)
        return tracked.prefill if tracked else None

    def advance(self, output: SchedulerOutput) -> tuple[dict[str, ComputedChunk], set[str]]:
        """Return (chunks that a step computes of tracked prefills, preempted prefills)."""
        if not self._prefills:
            return {}, set()
        preempted = self._prefills.keys() & (output.preempted_req_ids or set())
        for request_id in preempted:
            del self._prefills[request_id]
        chunks = {}
        for request_id, new_blocks, num_computed in _iterate_scheduled(output):
            tracked = self._prefills.get(request_id)
            if tracked is None or tracked.num_final == tracked.prefill.num_blocks:
                continue
            tracked.blocks = (*tracked.blocks, *new_blocks)[: tracked.prefill.num_blocks]
            computed = num_computed + output.num_scheduled_tokens[request_id]
            is_last = computed >= tracked.num_tokens
            final = tracked.prefill.num_blocks if is_last else computed // self._block_size
            chunks[request_id] = ComputedChunk(tracked.blocks, tracked.num_final, final, is_last)
            tracked.num_final = final
        return chunks, set(preempted)


def _iterate_scheduled(output: SchedulerOutput) -> Iterator[tuple[str, Any, int]]:
    """Yield (request id, new blocks, tokens computed before) for every request of a step."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.block_ids[0], request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, blocks, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield request_id, blocks[0] if blocks else (), num_computed


def build_extra_keys(request: Request) -> str:
    """Return the inputs of a request's KV other than the tokens, as in vLLM's prefix cache."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = ",".join(
        f"{feature.identifier}@{feature.mm_position.offset}"
        for feature in request.mm_features or ()
    )
    return f"{adapter}|{request.cache_salt or ''}|{media}"


def _compute_digest(request: Request) -> str:
    tokens = (request.prompt_token_ids or ())[: request.num_prompt_tokens]
    return compute_prompt_digest(tokens, build_extra_keys(request))
