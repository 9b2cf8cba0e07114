"""The points that the operator profiler measures."""

from dataclasses import dataclass


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
