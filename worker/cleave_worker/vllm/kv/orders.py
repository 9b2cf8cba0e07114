"""What the scheduler's half of the connector tells the workers' half with each step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from cleave_worker.transfer.holds import Begun, Held
from cleave_worker.transfer.identity import HandOff


@dataclass(frozen=True, slots=True)
class Wanted:
    """KV to pull for a request that waits for it."""

    hand_off: HandOff
    prompt_digest: str
    """Of the prompt as this engine has it."""
    first_block: int
    """Blocks before it are in the prefix cache."""
    blocks: tuple[int, ...]
    """Own blocks to fill."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of a prefill that is followed."""

    blocks: tuple[int, ...]
    """All that the prompt has so far."""
    num_before: int
    """Of them, final before the step."""
    num_final: int
    """After it."""
    is_last: bool


@dataclass
class Orders(KVConnectorMetadata):
    """By request id of this engine."""

    hold: dict[str, Held] = field(default_factory=dict)
    begin: dict[str, Begun] = field(default_factory=dict)
    """Prefills that will be followed while they run."""
    compute: dict[str, Chunk] = field(default_factory=dict)
    """What this step computes of them."""
    give_up: set[str] = field(default_factory=set)
    """Of them, those whose blocks are gone."""
    expect: dict[str, HandOff] = field(default_factory=dict)
    """Will be pulled when it is their turn; their leases are to be extended until then."""
    pull: dict[str, Wanted] = field(default_factory=dict)
    decline: dict[str, HandOff] = field(default_factory=dict)
    """Will not be pulled: their owners may free them."""
    addresses: tuple[tuple[str, int], ...] = ()
    """Where the ranks serve, in their order; with the first step."""


@dataclass(frozen=True)
class Place(KVConnectorHandshakeMetadata):
    """Where one rank serves what it holds."""

    host: str
    port: int
