"""Measured profiles: the output of `cleave profile` and the operator profiler, as types and a file.

Read by the emulated engine (so: standard library only, PyYAML when the file is YAML), the planner's
estimator and the command line. A profile holds iterations of an engine, or the operators of one
layer (Vidur, section 4.3), or both. What is hard: a wrong number here makes every plan wrong, so
construction and reading refuse implausible values, in one line that names the field, the value and
the remedy.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cleave.perf.profile.codec import InvalidProfileError, decode, encode, to_camel_case

KIND = "LatencyProfile"
VERSION = 1
_MAX_FILE_BYTES = 64 << 20
_MAX_NUMBER = 1e12
_MAY_BE_ZERO = ("context_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measured duration."""

    ms: float
    """Median of the repeats, above 0."""
    repeats: int = 1
    spread_ms: float = 0.0
    """Distance between the 25th and the 75th percentile of the repeats."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What was measured: all fields but the duration; lists of points are sorted by it."""
        return tuple(getattr(self, name) for name in self.list_key_fields())

    @classmethod
    @cache
    def list_key_fields(cls) -> tuple[str, ...]:
        """Names of the fields of `key`."""
        own = dataclasses.fields(cls)[len(dataclasses.fields(ProfilePoint)) :]
        return tuple(part.name for part in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint(ProfilePoint):
    """One prefill iteration over prompts of one length."""

    prompts: int = 1
    tokens: int
    """Tokens of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint(ProfilePoint):
    """One decode iteration of `batch` requests."""

    batch: int
    context_tokens: int
    """Sum over all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPoint(ProfilePoint):
    """One iteration with one prompt and `batch` decoding requests."""

    prompt_tokens: int
    batch: int
    context_tokens: int
    """Sum over the decoding requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPoint(ProfilePoint):
    """The transfer of one prompt's KV to another instance."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPoint(ProfilePoint):
    """A token-level operator (Vidur, section 4.3): matrix product, norm, activation. `ms` is the
    sum of its uses in one layer, or in one iteration if it runs once per iteration."""

    operator: str
    tensor_parallel_size: int = 1
    """Tensor parallel size of the measured shard."""
    tokens: int
    """Rows: prompt tokens plus decoding requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionPoint(ProfilePoint):
    """Attention of one layer for one prompt chunk."""

    tensor_parallel_size: int = 1
    tokens: int
    """Tokens of the chunk."""
    cached_tokens: int = 0
    """Tokens of the prompt before the chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionPoint(ProfilePoint):
    """Attention of one layer for `batch` decoding requests."""

    tensor_parallel_size: int = 1
    batch: int
    context_tokens: int
    """Sum over all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAttentionPoint(ProfilePoint):
    """Attention of one layer for a prompt chunk and `batch` decoding requests."""

    tensor_parallel_size: int = 1
    tokens: int
    """Tokens of the chunk."""
    cached_tokens: int = 0
    """Tokens of the prompt before the chunk."""
    batch: int
    context_tokens: int
    """Sum over the decoding requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPoint(ProfilePoint):
    """A collective or a send over the links of the machine."""

    gpus: int = 2
    size_bytes: int
    """Bytes of one GPU's tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The operators of one model on one GPU type, from which iteration times are composed."""

    num_layers: int
    hidden_size: int
    activation_bytes: int = 2
    """Bytes of one element of an activation."""
    pass_overhead_ms: float = 0.0
    """Overhead of the engine per iteration, during which the GPU is idle."""
    layer: tuple[LinearPoint, ...]
    """Operators of one layer; their sum is the layer without attention and all-reduces."""
    once: tuple[LinearPoint, ...] = ()
    """Operators that run once per iteration: embedding, LM head."""
    prefill_attention: tuple[PrefillAttentionPoint, ...]
    decode_attention: tuple[DecodeAttentionPoint, ...]
    mixed_attention: tuple[MixedAttentionPoint, ...] = ()
    """Of both in one kernel; empty: as long as one after the other."""
    all_reduce: tuple[CommunicationPoint, ...] = ()
    """Two run in each layer with tensor parallelism; required for sizes above 1."""
    send: tuple[CommunicationPoint, ...] = ()
    """One runs between two pipeline stages; empty: the planner's link model is used."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "activation_bytes"):
            _check_number(f"operators.{to_camel_case(name)}", getattr(self, name), 1)
        _check_number("operators.passOverheadMs", self.pass_overhead_ms, 0)
        for name in ("layer", "prefill_attention", "decode_attention"):
            _check_points(f"operators.{to_camel_case(name)}", getattr(self, name), 2)
        for name in ("once", "mixed_attention", "all_reduce", "send"):
            _check_points(f"operators.{to_camel_case(name)}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """One model on one device type. Construction raises InvalidProfileError."""

    model: str
    """As in spec.model, for example meta-llama/Llama-3.1-8B."""
    device: str
    """GPU type as in the catalogue, or the CPU's name."""
    engine: str
    """vllm, emulated, torch."""
    measured_at: str
    """ISO 8601 date or time."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Version by name."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_capacity_tokens: int | None = None
    """Tokens of KV that fit on the instance; None: not measured."""
    max_model_len: int | None = None
    dispatch_ms: float = 0.0
    """Time of HTTP and the engine's API server per request; the points exclude it."""
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    mixed: tuple[MixedPoint, ...] = ()
    """Not used in the fit: they validate the prediction of mixed iterations."""
    transfer: tuple[TransferPoint, ...] = ()
    operators: Operators | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Tensor and pipeline parallel size."""
        return self.tensor_parallel_size, self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in ("model", "device", "engine", "measured_at"):
            _check_text(to_camel_case(name), getattr(self, name))
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            _check_number(to_camel_case(name), getattr(self, name), 1)
        for name in ("kv_capacity_tokens", "max_model_len"):
            if (value := getattr(self, name)) is not None:
                _check_number(to_camel_case(name), value, 1)
        _check_number("dispatchMs", self.dispatch_ms, 0)
        if bool(self.prefill) != bool(self.decode) or not (self.prefill or self.operators):
            raise InvalidProfileError("needs both prefill and decode points, or operators")
        least = 2 if self.prefill else 0
        _check_points("prefill", self.prefill, least)
        _check_points("decode", self.decode, least)
        _check_points("mixed", self.mixed, 0)
        _check_points("transfer", self.transfer, 0)
        if self.prefill and len({point.prompts * point.tokens for point in self.prefill}) < 2:
            raise InvalidProfileError("prefill: needs two lengths or more, to draw a line")


def read_profile(path: str | Path) -> MeasuredProfile:
    """The profile in a JSON or YAML file. Raises InvalidProfileError, one line with the path."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidProfileError(f"is larger than {_MAX_FILE_BYTES >> 20} MiB")
        return _decode_profile(_parse_document(path))
    except OSError as error:
        raise InvalidProfileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidProfileError(f"{path}: not UTF-8 text") from error
    except InvalidProfileError as error:
        raise InvalidProfileError(f"{path}: {error}") from error


def write_profile(profile: MeasuredProfile, path: str | Path) -> None:
    """Write `profile` atomically, as JSON if the name ends in .json, else as YAML."""
    path = Path(path)
    body = encode(profile)
    assert isinstance(body, dict)
    document = {"kind": KIND, "version": VERSION, **body}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(_format_document(document, path.suffix == ".json"), encoding="utf-8")
    partial.replace(path)


def _parse_document(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidProfileError(f"not JSON: {error}") from error
    import yaml  # here, because emulated engines with a profile by name do not need it

    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidProfileError(f"not YAML: {' '.join(str(error).split())}") from error


def _format_document(document: Mapping[str, Any], as_json: bool) -> str:
    if as_json:
        return json.dumps(document, indent=1) + "\n"
    import yaml

    # None: lists and objects in block style, each point inside them on one line.
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    return text


def _decode_profile(document: object) -> MeasuredProfile:
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InvalidProfileError(f"is no profile: kind must be {KIND}")
    if document.get("version") != VERSION:
        raise InvalidProfileError(
            f"version: {document.get('version')!r} is unknown; this Cleave reads {VERSION}"
        )
    body = {key: value for key, value in document.items() if key not in ("kind", "version")}
    profile = decode(MeasuredProfile, body, "")
    assert isinstance(profile, MeasuredProfile)
    return profile


def _check_points(name: str, points: Sequence[ProfilePoint], least: int) -> None:
    if len(points) < least:
        raise InvalidProfileError(f"{name}: has {len(points)} points; measure {least} or more")
    for index, point in enumerate(points):
        where = f"{name}[{index}]"
        _check_number(f"{where}.ms", point.ms, 0)
        if point.ms == 0:
            raise InvalidProfileError(f"{where}.ms: 0 is not a measurement; must be above 0")
        _check_number(f"{where}.repeats", point.repeats, 1)
        _check_number(f"{where}.spreadMs", point.spread_ms, 0)
        for part, value in zip(point.list_key_fields(), point.key, strict=True):
            if isinstance(value, str):
                _check_text(f"{where}.{to_camel_case(part)}", value)
            else:
                smallest = 0 if part in _MAY_BE_ZERO else 1
                _check_number(f"{where}.{to_camel_case(part)}", value, smallest)
        if index and points[index - 1].key >= point.key:
            raise InvalidProfileError(
                f"{where}: {point.key} comes after {points[index - 1].key}; "
                "sort the points and measure each once"
            )


def _check_number(name: str, value: float, least: float) -> None:
    if not math.isfinite(value) or not least <= value <= _MAX_NUMBER:
        raise InvalidProfileError(
            f"{name}: {value} is out of range; must be from {least} to {_MAX_NUMBER:g}"
        )


def _check_text(name: str, value: str) -> None:
    if not value or len(value) > 256 or not value.isprintable():
        raise InvalidProfileError(f"{name}: {value[:60]!r} must be 1 to 256 printable characters")
