"""Metadata that the scheduler side of the connector sends to the workers with each step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from cleave_worker.transfer.block_leases import FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.handoff import Handoff
from cleave_worker.transfer.prefix_client import PrefixRead


@dataclass(frozen=True, slots=True)
class PullTask:
    """KV to pull for a waiting request, and the local blocks to fill."""

    handoff: Handoff
    prompt_digest: str
    """Of the prompt as this engine received it."""
    first_block: int
    """Blocks before it are in the prefix cache."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """The part of a registered prefill that a step computes, and how many blocks are then final."""

    blocks: tuple[int, ...]
    """All blocks that the prompt has so far."""
    num_final_before: int
    num_final_after: int
    is_last: bool


@dataclass
class CleaveConnectorMetadata(base.KVConnectorMetadata):
    """The workers' tasks in a step, by request id of this engine."""

    finished_prefills: dict[str, FinishedPrefill] = field(default_factory=dict)
    started_prefills: dict[str, PrefillInProgress] = field(default_factory=dict)
    """Prefills that consumers may pull while they run."""
    computed_chunks: dict[str, ComputedChunk] = field(default_factory=dict)
    """The parts of them that this step computes."""
    cancelled_prefills: set[str] = field(default_factory=set)
    """Those that were aborted or preempted, so that their blocks are reused."""
    expected_pulls: dict[str, Handoff] = field(default_factory=dict)
    """Handoffs of queued requests, whose leases are extended until they are pulled."""
    pulls: dict[str, PullTask] = field(default_factory=dict)
    declined_pulls: dict[str, Handoff] = field(default_factory=dict)
    """Handoffs that will not be pulled, so that their producers may free the blocks."""
    prefix_reads: dict[str, PrefixRead] = field(default_factory=dict)
    """Prefixes that waiting requests pull from the caches of other engines."""
    addresses: tuple[tuple[str, int], ...] = ()
    """(host, port) of each rank, in the order of ranks; sent with the first step."""
    prefix_secret: str = ""
    """Signs the blocks that this scheduler leases; sent with `addresses`."""


@dataclass(frozen=True)
class RankAddress(base.KVConnectorHandshakeMetadata):
    """The address at which one rank serves its KV."""

    host: str
    port: int
