"""Metadata that the scheduler side of the connector sends to the workers with each step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from cleave_worker.transfer.block_leases import Begun, Held
from cleave_worker.transfer.handoff import HandOff


@dataclass(frozen=True, slots=True)
class Wanted:
    """KV to pull for a waiting request."""

    hand_off: HandOff
    prompt_digest: str
    """Of the prompt as this engine received it."""
    first_block: int
    """Blocks before it are in the prefix cache."""
    blocks: tuple[int, ...]
    """Local blocks to fill."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of a registered prefill."""

    blocks: tuple[int, ...]
    """All blocks that the prompt has so far."""
    num_before: int
    """Blocks that are final before the step."""
    num_final: int
    """Blocks that are final after the step."""
    is_last: bool


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers have to do in a step, by request id of this engine."""

    hold: dict[str, Held] = field(default_factory=dict)
    begin: dict[str, Begun] = field(default_factory=dict)
    """Prefills that consumers may pull while they run."""
    compute: dict[str, Chunk] = field(default_factory=dict)
    """What this step computes of them."""
    give_up: set[str] = field(default_factory=set)
    """Those that were aborted or preempted, so that their blocks are reused."""
    expect: dict[str, HandOff] = field(default_factory=dict)
    """Handoffs of queued requests, whose leases are extended until they are pulled."""
    pull: dict[str, Wanted] = field(default_factory=dict)
    decline: dict[str, HandOff] = field(default_factory=dict)
    """Handoffs that will not be pulled, so that their producers may free the blocks."""
    addresses: tuple[tuple[str, int], ...] = ()
    """(host, port) of each rank, in the order of ranks; sent with the first step."""


@dataclass(frozen=True)
class Place(KVConnectorHandshakeMetadata):
    """The address at which one rank serves its KV."""

    host: str
    port: int
