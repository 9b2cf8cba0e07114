"""Who may ask, and for how much: the file of API keys as tenants. Pure, but for reading the file.

Keys are kept as digests: neither a core dump nor the timing of a comparison tells one.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from cleave.gateway.admission.limits import Limits
from cleave.gateway.config import Late

MAX_QUEUED = 256
_DIGEST = "sha256:"


class KeysError(ValueError):
    """The file of keys cannot be used."""


class Tenant(msgspec.Struct, frozen=True):
    """Whoever shares keys, limits and a place in the queue."""

    name: str
    limits: Limits = Limits()
    weight: float = 1.0
    """Share of prompt tokens against other tenants that wait."""
    priority: int = 0
    """Higher goes before all lower ones."""
    max_queued: int = MAX_QUEUED
    late: Late | None = None
    """None: as the gateway is told for all."""


EVERYBODY = Tenant("")
"""Of a gateway without tenants."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class _Stated(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A tenant as the file states it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_concurrent: _Count | None = None
    max_queued: _Count = MAX_QUEUED
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    late: Late | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: Annotated[list[_Stated], msgspec.Meta(min_length=1)]


def read_tenants(path: Path) -> dict[bytes, Tenant]:
    """Tenants by digest of their keys. Raises KeysError.

    A file is either one key a line (`#` begins a comment), or YAML that begins with `tenants:`.
    Keys are `sha256:` and the hexadecimal digest, or as clients send them.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{path}: is not text") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    stated = [line for line in lines if line]
    if not stated:
        raise KeysError(f"{path}: holds no key")
    if not stated[0].startswith("tenants:"):
        return {_digest(line, path): EVERYBODY for line in stated}
    return _build(_parse(text, path), path)


def digest(key: bytes) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key).digest()


def _parse(text: str, path: Path) -> _File:
    try:
        return msgspec.convert(yaml.safe_load(text), _File)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise KeysError(f"{path}: {line}is not YAML") from None
    except msgspec.ValidationError as error:
        raise KeysError(f"{path}: {error}") from None


def _build(file: _File, path: Path) -> dict[bytes, Tenant]:
    found: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for one in file.tenants:
        if one.name in names:
            raise KeysError(f"{path}: two tenants are named {one.name!r}; give each its own name")
        names.add(one.name)
        limits = Limits(
            one.requests_per_minute or 0, one.tokens_per_minute or 0, one.max_concurrent or 0
        )
        tenant = Tenant(one.name, limits, one.weight, one.priority, one.max_queued, one.late)
        for key in one.keys:
            kept = _digest(key, path)
            if kept in found:
                raise KeysError(
                    f"{path}: {found[kept].name!r} and {one.name!r} have a key in common"
                )
            found[kept] = tenant
    return found


def _digest(key: str, path: Path) -> bytes:
    if not key.startswith(_DIGEST):
        return digest(key.encode())
    try:
        kept = bytes.fromhex(key.removeprefix(_DIGEST))
    except ValueError:
        kept = b""
    if len(kept) != hashlib.sha256().digest_size:
        raise KeysError(f"{path}: {_DIGEST} must be followed by 64 hexadecimal digits")
    return kept
