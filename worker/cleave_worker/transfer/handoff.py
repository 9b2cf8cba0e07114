"""The identity of a KV handoff, and the reasons for which one is refused.

An engine attends to any content of a block. So a handoff names boot, request, epoch, prompt and
layout; both ends compare them, and the first difference is the reason of a refusal.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from cleave_worker.transfer.sharding import ParallelShape

_DIGEST_BYTES = 16


class RefusalReason(StrEnum):
    """Why a handoff failed; values are labels of the metric cleave_kv_lost."""

    MALFORMED = "malformed"
    """A field is missing, or the handoff covers fewer tokens than the prompt has."""
    BOOT = "boot"
    """The producer was restarted since."""
    LAYOUT = "layout"
    """The model, its weights, data type or block size differ, or a rank does not have the expected
    KV."""
    PROMPT = "prompt"
    """The KV is of other prompt tokens."""
    NOT_HELD = "not_held"
    """Pulled already, expired, or never leased."""
    EPOCH = "epoch"
    """The request is leased, but under another epoch than that of the handoff."""
    BUSY = "busy"
    LAPSED = "lapsed"
    TIME_OUT = "time_out"
    PEER_LOST = "peer_lost"
    """The connection failed or broke."""
    CHECKSUM = "checksum"


class RefusedError(Exception):
    """The KV must not be used; the engine has to compute the prompt itself."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@contextmanager
def refuse_on(error_type: type[Exception], reason: RefusalReason) -> Iterator[None]:
    """Raise errors of this type as a RefusedError."""
    try:
        yield
    except error_type as error:
        raise RefusedError(reason, str(error)) from error


class KvLayout(msgspec.Struct, frozen=True):
    """Layout of a model's KV in blocks; nothing is transferred unless both ends are equal. The
    parallelism may differ, see `ParallelShape`."""

    model: str
    """Model source and revision."""
    dtype: str
    block_size: int
    """Tokens per block."""
    num_layers: int
    """Layers of the whole model."""
    num_kv_heads: int
    """KV heads of the whole model; 1 with MLA, where every rank has the whole latent KV."""
    head_size: int
    arrangement: str
    """Order of the bytes of one head within a block."""
    weights: str = ""
    """Digest of what the engine has loaded, as its agent found it; empty: an earlier version's, or
    started without an agent."""

    def find_difference(self, other: "KvLayout") -> str:
        """Return the first field that differs, with both values; empty when none does."""
        for name in self.__struct_fields__:
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} is {its!r} at the producer and {own!r} at the consumer"
        return ""


class Handoff(msgspec.Struct, frozen=True):
    """A leased prompt, as the producer describes it to a consumer."""

    boot_id: str
    request_id: str
    epoch: int
    """Number of the lease within this boot, from 1; 0: see `is_overlapped`."""
    prompt_digest: str
    num_tokens: int
    addresses: tuple[tuple[str, int], ...]
    """(host, port) of each rank of the producer, in the order of ranks."""
    shape: ParallelShape = ParallelShape()
    key: str = ""
    """Of the producer's KV port, for a proof; empty: the producer asks for none."""

    def __repr__(self) -> str:
        """Without the key, for logs."""
        return f"Handoff({self.boot_id}, {self.request_id}, epoch {self.epoch})"

    @property
    def is_overlapped(self) -> bool:
        """Whether it was made before the prefill, when epoch, prompt hash and length are unknown.
        `request_id` is then a name that the gateway gave to prefill and decode request alike."""
        return not self.epoch


def compute_prompt_digest(token_ids: Iterable[int], kind: str = "") -> str:
    """Hash the tokens and the other inputs of their KV (`kind`: adapter, images, cache salt)."""
    hasher = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES)
    hasher.update(kind.encode())
    return hasher.hexdigest()
