"""Tenants and their API keys, read from a file. Pure, except for reading the file.

Keys are kept as hashes, so neither a core dump nor the timing of a comparison reveals one. A hash
without a salt protects random keys only, so short ones are refused.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from cleave.api.enums import LateRequestPolicy
from cleave.gateway.admission.rate_limit import TenantLimits

MAX_QUEUED = 256
MIN_KEY_CHARACTERS = 16
"""Of a key that is given as text; `openssl rand -hex 32` makes one of 64."""
_DIGEST_PREFIX = "sha256:"


class ApiKeysError(ValueError):
    """The file of API keys cannot be used."""


class Tenant(msgspec.Struct, frozen=True):
    """Clients that share keys, limits and a queue."""

    name: str
    limits: TenantLimits = TenantLimits()
    weight: float = 1.0
    """Share of prompt tokens relative to other waiting tenants."""
    priority: int = 0
    """Higher priorities are served before all lower ones."""
    min_request_priority: int | None = None
    """Lowest `priority` that its requests pass to engines, which serve lower ones first."""
    max_queued: int = MAX_QUEUED
    late: LateRequestPolicy | None = None
    """None: as configured for the gateway."""
    cache_salt: str = ""
    """Engines share cached prompts among requests with the same one only; empty: among all."""


DEFAULT_TENANT = Tenant("")
"""The tenant of all requests when the gateway has no tenants."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class _TenantSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_concurrent: _Count | None = None
    max_queued: _Count = MAX_QUEUED
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    min_request_priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0
    late: LateRequestPolicy | None = None
    cache_group: Annotated[str, msgspec.Meta(min_length=1, max_length=63)] | None = None
    """Tenants with the same one share cached prompts; None: this one shares with no other."""


class _TenantsFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: Annotated[list[_TenantSpec], msgspec.Meta(min_length=1)]


def read_tenants(path: Path) -> dict[bytes, Tenant]:
    """Tenants by hash of their keys. Raises ApiKeysError.
    The file contains either one key per line (`#` begins a comment), or YAML that begins with
    `tenants:`. A key is written as clients send it, or as `sha256:` and the hexadecimal hash."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ApiKeysError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ApiKeysError(f"{path}: is not text") from None
    entries = [key for line in text.splitlines() if (key := line.partition("#")[0].strip())]
    if not entries:
        raise ApiKeysError(f"{path}: holds no key")
    if not entries[0].startswith("tenants:"):
        return {_hash_configured_key(line, path): DEFAULT_TENANT for line in entries}
    return _build_tenants(_parse_tenants(text, path), path)


def hash_key(key: bytes) -> bytes:
    """The SHA-256 hash of a key, stored in place of the key."""
    return hashlib.sha256(key).digest()


def _parse_tenants(text: str, path: Path) -> _TenantsFile:
    import yaml  # most gateways need none of it: 20 ms of each start

    try:
        return msgspec.convert(yaml.safe_load(text), _TenantsFile)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ApiKeysError(f"{path}: {line}is not YAML") from None
    except msgspec.ValidationError as error:
        raise ApiKeysError(f"{path}: {error}") from None


def _build_tenants(file: _TenantsFile, path: Path) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for spec in file.tenants:
        if spec.name in names:
            problem = f"two tenants are named {spec.name!r}; give each its own name"
            raise ApiKeysError(f"{path}: {problem}")
        names.add(spec.name)
        limits = TenantLimits(
            spec.requests_per_minute or 0, spec.tokens_per_minute or 0, spec.max_concurrent or 0
        )
        tenant = Tenant(
            spec.name,
            limits,
            spec.weight,
            spec.priority,
            spec.min_request_priority,
            spec.max_queued,
            spec.late,
            _make_cache_salt(spec),
        )
        for key in spec.keys:
            hashed = _hash_configured_key(key, path)
            if hashed in tenants:
                raise ApiKeysError(
                    f"{path}: {tenants[hashed].name!r} and {spec.name!r} have a key in common"
                )
            tenants[hashed] = tenant
    return tenants


def _make_cache_salt(spec: _TenantSpec) -> str:
    kind, name = ("tenant", spec.name) if spec.cache_group is None else ("group", spec.cache_group)
    return hashlib.sha256(f"{kind}/{name}".encode()).hexdigest()[:32]


def _hash_configured_key(key: str, path: Path) -> bytes:
    if not key.startswith(_DIGEST_PREFIX):
        if len(key) < MIN_KEY_CHARACTERS:
            problem = f"a key has {len(key)} characters, fewer than {MIN_KEY_CHARACTERS}"
            raise ApiKeysError(f"{path}: {problem}: make one with `openssl rand -hex 32`")
        return hash_key(key.encode())
    try:
        hashed = bytes.fromhex(key.removeprefix(_DIGEST_PREFIX))
    except ValueError:
        hashed = b""
    if len(hashed) != hashlib.sha256().digest_size:
        raise ApiKeysError(f"{path}: {_DIGEST_PREFIX} must be followed by 64 hexadecimal digits")
    return hashed
