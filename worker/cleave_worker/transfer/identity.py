"""What must agree before KV is read: whose it is, of which prompt, and how it lies in memory.

Engines attend to whatever lies in a block. A hand-off therefore names boot, request, hold, prompt
and layout, both ends compare them, and the first that differs is the reason of a refusal.
"""

import hashlib
from array import array
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cleave_worker.transfer.shapes import Shape

_DIGEST_BYTES = 16


class Reason(StrEnum):
    """Why a hand-off came to nothing; labels of a metric."""

    MALFORMED = "malformed"
    """It lacks a field, or offers fewer tokens than the prompt has."""
    BOOT = "boot"
    """The owner was started again since."""
    LAYOUT = "layout"
    """Another model, type or block size, or a rank that does not hold what it should."""
    PROMPT = "prompt"
    """KV of other tokens."""
    NOT_HELD = "not_held"
    """Pulled already, expired, or never held."""
    EPOCH = "epoch"
    """The request is held, but not from the time the hand-off is of."""
    BUSY = "busy"
    """Somebody else reads it now."""
    LAPSED = "lapsed"
    """The owner gave the blocks up while they were read."""
    TIME_OUT = "time_out"
    LOST = "peer_lost"
    """No connection, or it broke."""
    CHECKSUM = "checksum"
    """Other bytes arrived than were sent."""


class RefusedError(Exception):
    """The KV is not to be used; nothing of it may be attended to."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Layout(msgspec.Struct, frozen=True):
    """How a model's KV lies in blocks; equal on both ends, or nothing is moved.

    How it is spread over ranks may differ: shapes.py.
    """

    model: str
    """Source and revision."""
    dtype: str
    block_size: int
    """Tokens."""
    num_layers: int
    """Of the whole model."""
    num_kv_heads: int
    """The same; 1 with MLA, of which every rank holds all."""
    head_size: int
    arrangement: str
    """Of the bytes that a block holds of one head."""

    def difference(self, other: "Layout") -> str:
        """The first field that differs, with both values; empty: none does."""
        for name in self.__struct_fields__:
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} is {its!r} there and {own!r} here"
        return ""


class HandOff(msgspec.Struct, frozen=True):
    """One held prompt, as its owner describes it to whoever will read it."""

    boot_id: str
    request_id: str
    epoch: int
    """Number of the hold within this boot, from 1; 0: see `ahead`."""
    prompt_digest: str
    num_tokens: int
    addresses: tuple[tuple[str, int], ...]
    """Host and port of each rank of the owner, in the order of ranks."""
    shape: Shape = Shape()
    """The owner's."""

    @property
    def ahead(self) -> bool:
        """Whether it was made before the prefill: number, digest and length are not known yet.

        The request id is then a name that the prefill was told too.
        """
        return not self.epoch


def prompt_digest(token_ids: Iterable[int], kind: str = "") -> str:
    """Of the tokens and of what else decides the KV (adapter, images, salt: `kind`)."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES)
    digest.update(kind.encode())
    return digest.hexdigest()
