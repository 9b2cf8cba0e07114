"""Iteration times of any parallelism from operators measured one by one (Vidur, 4.3 and 4.4).

Called by the estimator and, for profiles in files, by the emulated engine: standard library only.
An iteration is the sum of its operators: token-level operators depend on its rows, attention of
prompts on their equivalent length sqrt(sum p_i^2), attention of decoding on the KV that it reads,
collectives on their bytes.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence

from cleave.perf.profile import curve, decode_fit, profile
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.profile.profile import (
    LinearPoint,
    MixedAttentionPoint,
    Operators,
    PrefillAttentionPoint,
)
from cleave.perf.timing import EngineTiming, interpolate_table

LM_HEAD = "lm_head"
"""The operator that has one row per request instead of one per token."""
_ALL_REDUCES_PER_LAYER = 2

RowsToMs = Callable[[Sequence[float]], list[float]]
"""Ascending numbers of rows -> ms of an iteration with each."""


def list_tensor_parallel_sizes(operators: Operators) -> tuple[int, ...]:
    """Tensor parallel sizes for which all operators of an iteration were measured."""
    lists = (operators.layer, operators.prefill_attention, operators.decode_attention)
    sizes = ({point.tensor_parallel_size for point in points} for points in lists)
    return tuple(sorted({1, *(p.gpus for p in operators.all_reduce)}.intersection(*sizes)))


def to_timing(operators: Operators, tensor: int, stages: int = 1) -> EngineTiming:
    """Compose the iteration times. Raises InvalidProfileError for a size that was not measured."""
    sizes = list_tensor_parallel_sizes(operators)
    if tensor not in sizes:
        measured = ", ".join(map(str, sizes)) or "none"
        raise InvalidProfileError(
            f"operators: tensorParallelSize {tensor} was not measured; complete are: {measured}"
        )
    rows = _fit_token_level(operators, tensor)
    head = _sum_operators([p for p in operators.once if p.operator == LM_HEAD], tensor)
    prefill = [p for p in operators.prefill_attention if p.tensor_parallel_size == tensor]
    fixed, per_token, square = fit_prompt_attention(prefill)
    decode = [p for p in operators.decode_attention if p.tensor_parallel_size == tensor]
    attention_ms, context_ms = decode_fit.fit_tables(decode)
    mixed = [p for p in operators.mixed_attention if p.tensor_parallel_size == tensor]
    factors = _fit_mixed_factors(mixed, (fixed, per_token, square), attention_ms, context_ms)
    layers = operators.num_layers
    token_counts = sorted({point.tokens for point in operators.layer})
    one_head = head([1])[0]
    prompt = [
        (n, ms + one_head + layers * (fixed + per_token * n))
        for n, ms in zip(token_counts, rows(token_counts), strict=True)
    ]
    batches = range(len(attention_ms))
    without_attention = map(operator.add, rows(batches), head(batches))
    step = float(curve.find_step(token_counts))
    hop_ms, hop_byte_ms = _fit_send(operators.send)
    return EngineTiming(
        prompt_step=step,
        prompt_ms=curve.tabulate(curve.fit_non_decreasing(prompt), step),
        prompt_square_ms=layers * square,
        decode_ms=tuple(
            other + layers * ms for other, ms in zip(without_attention, attention_ms, strict=True)
        ),
        decode_context_ms=tuple(layers * ms for ms in context_ms),
        mixed_context_ms=scale_contexts(factors, [layers * ms for ms in context_ms]),
        stages=stages,
        hop_ms=hop_ms,
        hop_token_ms=hop_byte_ms * operators.hidden_size * operators.activation_bytes,
    )


def fit_prompt_attention(points: Sequence[PrefillAttentionPoint]) -> tuple[float, float, float]:
    """(ms per chunk, per token, per token^2 of end^2 - start^2) of one layer; none below 0."""
    squares = [(p.tokens + p.cached_tokens) ** 2 - p.cached_tokens**2 for p in points]
    weights = [1 / point.ms**2 for point in points]
    ms = [point.ms for point in points]
    rows = [[1.0, p.tokens, square] for p, square in zip(points, squares, strict=True)]
    try:
        fixed, per_token, square_ms = curve.solve_least_squares(rows, ms, weights)
    except ValueError:  # too few lengths for three coefficients
        return 0.0, 0.0, curve.solve_least_squares([[square] for square in squares], ms, weights)[0]
    return fixed, per_token, square_ms


def _fit_mixed_factors(
    points: Sequence[MixedAttentionPoint],
    prompt: tuple[float, float, float],
    attention_ms: Sequence[float],
    context_ms: Sequence[float],
) -> curve.Points:
    """(batch, factor on the time of its contexts beside a prompt), from 1 on; empty: no points.
    `prompt`: as `fit_prompt_attention` returns it; the tables are those of decoding alone."""
    across: dict[int, float] = defaultdict(float)
    along: dict[int, float] = defaultdict(float)
    for p in points:
        square = (p.tokens + p.cached_tokens) ** 2 - p.cached_tokens**2
        rows = zip((1, p.tokens, square), prompt, strict=True)
        others_ms = sum(x * ms for x, ms in rows) + interpolate_table(1.0, attention_ms, p.batch)
        alone_ms = context_ms[min(p.batch, len(context_ms) - 1)] * p.context_tokens
        along[p.batch] += alone_ms * (p.ms - others_ms) / p.ms**2
        across[p.batch] += alone_ms**2 / p.ms**2
    return [(n, max(along[n] / across[n], 1.0)) for n in sorted(across) if across[n]]


def scale_contexts(factors: curve.Points, context_ms: Sequence[float]) -> tuple[float, ...]:
    """An EngineTiming's `mixed_context_ms` from its `decode_context_ms` and (batch, factor), which
    are interpolated between and constant beyond; empty for no factors."""
    if not factors:
        return ()
    (first, least), (last, most) = factors[0], factors[-1]
    count = max(len(context_ms), int(last) + 1)
    ends = (first - 1, least), (last + 1, most)
    batches = (min(max(n, first), last) for n in range(count))
    by_batch = curve.interpolate_all([ends[0], *factors, ends[1]], batches)
    return tuple(
        factor * context_ms[min(n, len(context_ms) - 1)] for n, factor in enumerate(by_batch)
    )


def _fit_token_level(operators: Operators, tensor: int) -> RowsToMs:
    """Rows -> ms of all layers with their all-reduces, of the operators that run once per
    iteration (without LM head), and of the engine's overhead."""
    layer = _sum_operators(operators.layer, tensor)
    once = _sum_operators([p for p in operators.once if p.operator != LM_HEAD], tensor)
    reduce = _fit_all_reduce(operators.all_reduce, tensor)
    row_bytes = operators.hidden_size * operators.activation_bytes

    def predict(rows: Sequence[float]) -> list[float]:
        parts = zip(layer(rows), reduce([n * row_bytes for n in rows]), once(rows), strict=True)
        return [
            operators.pass_overhead_ms
            + operators.num_layers * (layer_ms + _ALL_REDUCES_PER_LAYER * reduce_ms)
            + once_ms
            for layer_ms, reduce_ms, once_ms in parts
        ]

    return predict


def _sum_operators(points: Sequence[LinearPoint], tensor: int) -> RowsToMs:
    by_operator: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        if point.tensor_parallel_size == tensor:
            by_operator[point.operator].append((point.tokens, point.ms))
    curves = [_build_interpolation(each) for each in by_operator.values()]

    def predict(rows: Sequence[float]) -> list[float]:
        columns = [each(rows) for each in curves]
        return [sum(row) for row in zip(*columns, strict=True)] if columns else [0.0] * len(rows)

    return predict


def _fit_all_reduce(points: Sequence[profile.CommunicationPoint], gpus: int) -> RowsToMs:
    if gpus == 1:
        return lambda sizes: [0.0] * len(sizes)
    return _build_interpolation([(p.size_bytes, p.ms) for p in points if p.gpus == gpus])


def _build_interpolation(points: curve.Points) -> RowsToMs:
    """Linear interpolation; below the first point constant, as the times of small kernels are."""
    if len(points) == 1:
        return lambda rows: [points[0][1]] * len(rows)
    rising = curve.fit_non_decreasing(points)
    least = rising[0][0]
    return lambda rows: curve.interpolate_all(rising, (max(at, least) for at in rows))


def _fit_send(points: Sequence[profile.CommunicationPoint]) -> tuple[float, float]:
    """(latency in ms, ms per byte) of one send; zeros when fewer than two were measured."""
    if len(points) < 2:
        return 0.0, 0.0
    rows, weights = [[1.0, p.size_bytes] for p in points], [1 / p.ms**2 for p in points]
    fixed, per_byte = curve.solve_least_squares(rows, [p.ms for p in points], weights)
    return fixed, per_byte
