"""Measures a model's operators at the points of a grid, one tensor parallel size after another."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from cleave.perf.model.model_shape import ModelShape
from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    LinearPoint,
    Operators,
    PrefillAttentionPoint,
)
from cleave_worker.profiler import collectives
from cleave_worker.profiler.clock import Clock, summarize
from cleave_worker.profiler.operators import (
    AttentionOperator,
    DeviceSpec,
    LinearOperator,
    Shard,
    build_iteration_operators,
    build_layer_operators,
)

Report = Callable[[str], None]

_LARGEST_KV_BYTES = 4 << 30
"""Most KV of one layer in a point of decode attention; an engine has memory for no more."""
_LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class ProfilerGrid:
    """Sizes to measure."""

    rows: tuple[int, ...]
    """Rows of token-level operators: prompt tokens plus decoding requests."""
    head_rows: tuple[int, ...]
    """Rows of the LM head: requests."""
    chunks: tuple[tuple[int, int], ...]
    """Prompt attention: (tokens of the chunk, tokens before it)."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Decode attention: context tokens of each request."""
    collective_bytes: tuple[int, ...]
    repeats: int


def build_full_grid(longest: int) -> ProfilerGrid:
    """Return all points up to prompts of `longest` tokens."""
    powers = _list_powers(1, longest)
    between = [n * 3 // 2 for n in powers if n >= 64 and n * 3 // 2 <= longest]
    prompts = _list_powers(64, longest)
    return ProfilerGrid(
        rows=tuple(sorted({*powers, *between})),
        head_rows=_list_powers(1, min(512, longest)),
        chunks=tuple((n, 0) for n in prompts)
        + tuple((n, before) for n in (512, 2048) for before in prompts if n <= before),
        batches=_list_powers(1, 256),
        contexts=_list_powers(64, longest),
        collective_bytes=_list_powers(4096, 256 << 20),
        repeats=15,
    )


def build_quick_grid(longest: int) -> ProfilerGrid:
    """Return a few points, to check that everything works."""
    return ProfilerGrid(
        rows=_list_powers(1, longest)[::2],
        head_rows=(1, 16),
        chunks=(*((n, 0) for n in _list_powers(64, longest)[::2]), (64, 64)),
        batches=(1, 8),
        contexts=_list_powers(64, longest)[::2],
        collective_bytes=(4096, 1 << 20),
        repeats=3,
    )


def _list_powers(first: int, last: int) -> tuple[int, ...]:
    powers = []
    while first <= last:
        powers.append(first)
        first *= 2
    return tuple(powers)


def measure(
    shape: ModelShape,
    sizes: Sequence[int],
    clock: Clock,
    device_spec: DeviceSpec,
    grid: ProfilerGrid,
    num_gpus: int,
    report: Report,
) -> Operators:
    """Measure all operators for tensor parallel `sizes`, and collectives over up to `num_gpus`.
    Raises ShardError, and CollectiveError when GPUs cannot communicate."""
    layer: list[LinearPoint] = []
    once: list[LinearPoint] = []
    prefill: list[PrefillAttentionPoint] = []
    decode: list[DecodeAttentionPoint] = []
    for shard in [Shard(shape, size) for size in sizes]:
        size = shard.size
        report(f"tensor parallel size {size}: linear layers")
        layer += _measure_linear(build_layer_operators(shard, device_spec), size, clock, grid)
        once += _measure_linear(build_iteration_operators(shard, device_spec), size, clock, grid)
        report(f"tensor parallel size {size}: attention")
        attention = AttentionOperator(shard, device_spec)
        prefill += _measure_prefill(attention, clock, grid)
        decode += _measure_decode(attention, clock, grid)
    reduced, sent = _measure_collectives(num_gpus, grid, device_spec, report)
    return Operators(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        activation_bytes=device_spec.dtype.itemsize,
        layer=tuple(sorted(layer, key=lambda point: point.key)),
        once=tuple(sorted(once, key=lambda point: point.key)),
        prefill_attention=tuple(sorted(prefill, key=lambda point: point.key)),
        decode_attention=tuple(sorted(decode, key=lambda point: point.key)),
        all_reduce=reduced,
        send=sent,
    )


def _measure_linear(
    operators: Iterable[LinearOperator], size: int, clock: Clock, grid: ProfilerGrid
) -> Iterable[LinearPoint]:
    for operator in operators:
        for rows in grid.head_rows if operator.name == _LM_HEAD else grid.rows:
            durations_ms = clock.measure(operator.build_run(rows), grid.repeats)
            duration = summarize(durations_ms, operator.weight)
            yield LinearPoint(
                operator=operator.name, tensor_parallel_size=size, tokens=rows, **duration
            )


def _measure_prefill(
    attention: AttentionOperator, clock: Clock, grid: ProfilerGrid
) -> Iterable[PrefillAttentionPoint]:
    size = attention.shard.size
    for tokens, before in grid.chunks:
        duration = summarize(clock.measure(attention.build_prefill(tokens, before), grid.repeats))
        yield PrefillAttentionPoint(
            tensor_parallel_size=size, tokens=tokens, cached_tokens=before, **duration
        )


def _measure_decode(
    attention: AttentionOperator, clock: Clock, grid: ProfilerGrid
) -> Iterable[DecodeAttentionPoint]:
    size = attention.shard.size
    for batch, context in product(grid.batches, grid.contexts):
        if batch * context * attention.shard.kv_bytes_per_token > _LARGEST_KV_BYTES:
            continue
        duration = summarize(clock.measure(attention.build_decode(batch, context), grid.repeats))
        yield DecodeAttentionPoint(
            tensor_parallel_size=size, batch=batch, context_tokens=batch * context, **duration
        )


def _measure_collectives(
    num_gpus: int, grid: ProfilerGrid, device_spec: DeviceSpec, report: Report
) -> tuple[tuple[CommunicationPoint, ...], tuple[CommunicationPoint, ...]]:
    reduced: list[CommunicationPoint] = []
    sent: list[CommunicationPoint] = []
    ranks = 2
    while ranks <= num_gpus:
        report(f"collectives of {ranks}")
        on_gpu = device_spec.device.type == "cuda"
        by_size = collectives.measure(ranks, grid.collective_bytes, grid.repeats, on_gpu)
        reduced += _build_points(ranks, by_size[0])
        if ranks == 2:
            sent += _build_points(ranks, by_size[1])
        ranks *= 2
    return tuple(reduced), tuple(sent)


def _build_points(ranks: int, times: collectives.Times) -> Iterable[CommunicationPoint]:
    for size_bytes, durations_ms in sorted(times.items()):
        yield CommunicationPoint(gpus=ranks, size_bytes=size_bytes, **summarize(durations_ms))
