"""Measures the operators of a model, one tensor parallel size after another."""

from collections.abc import Callable, Iterable, Sequence
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
from cleave_worker.profiler.grid import ProfilerGrid
from cleave_worker.profiler.operators import (
    AttentionOperator,
    DeviceSpec,
    LinearOperator,
    build_iteration_operators,
    build_layer_operators,
)
from cleave_worker.profiler.shard import Shard

Report = Callable[[str], None]

_LARGEST_KV_BYTES = 4 << 30
"""Most KV of one layer in a point of decode attention; an engine has memory for no more."""
_LM_HEAD = "lm_head"


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

    Raises ShardError, and CollectiveError when GPUs cannot communicate.
    """
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
            duration = summarize(clock.measure(operator.build_run(rows), grid.repeats))
            yield LinearPoint(
                operator=operator.name,
                tensor_parallel_size=size,
                tokens=rows,
                ms=duration.ms * operator.weight,
                spread_ms=duration.spread_ms * operator.weight,
                repeats=grid.repeats,
            )


def _measure_prefill(
    attention: AttentionOperator, clock: Clock, grid: ProfilerGrid
) -> Iterable[PrefillAttentionPoint]:
    for tokens, before in grid.chunks:
        duration = summarize(clock.measure(attention.build_prefill(tokens, before), grid.repeats))
        yield PrefillAttentionPoint(
            tensor_parallel_size=attention.shard.size,
            tokens=tokens,
            cached_tokens=before,
            ms=duration.ms,
            spread_ms=duration.spread_ms,
            repeats=grid.repeats,
        )


def _measure_decode(
    attention: AttentionOperator, clock: Clock, grid: ProfilerGrid
) -> Iterable[DecodeAttentionPoint]:
    for batch, context in product(grid.batches, grid.contexts):
        if batch * context * attention.shard.kv_bytes_per_token > _LARGEST_KV_BYTES:
            continue
        duration = summarize(clock.measure(attention.build_decode(batch, context), grid.repeats))
        yield DecodeAttentionPoint(
            tensor_parallel_size=attention.shard.size,
            batch=batch,
            context_tokens=batch * context,
            ms=duration.ms,
            spread_ms=duration.spread_ms,
            repeats=grid.repeats,
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
        reduced += _build_points(ranks, by_size[0], grid.repeats)
        if ranks == 2:
            sent += _build_points(ranks, by_size[1], grid.repeats)
        ranks *= 2
    return tuple(reduced), tuple(sent)


def _build_points(
    ranks: int, times: collectives.Times, repeats: int
) -> Iterable[CommunicationPoint]:
    for size_bytes, durations_ms in sorted(times.items()):
        duration = summarize(durations_ms)
        yield CommunicationPoint(
            gpus=ranks,
            size_bytes=size_bytes,
            ms=duration.ms,
            spread_ms=duration.spread_ms,
            repeats=repeats,
        )
