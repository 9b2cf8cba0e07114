"""The points that the operator profiler measures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
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


def full(longest: int) -> Grid:
    """Return all points up to prompts of `longest` tokens."""
    powers = _powers(1, longest)
    between = [n * 3 // 2 for n in powers if n >= 64 and n * 3 // 2 <= longest]
    prompts = _powers(64, longest)
    return Grid(
        rows=tuple(sorted({*powers, *between})),
        head_rows=_powers(1, min(512, longest)),
        chunks=tuple((n, 0) for n in prompts)
        + tuple((n, before) for n in (512, 2048) for before in prompts if n <= before),
        batches=_powers(1, 256),
        contexts=_powers(64, longest),
        collective_bytes=_powers(4096, 256 << 20),
        repeats=15,
    )


def quick(longest: int) -> Grid:
    """Return a few points, to check that everything works."""
    return Grid(
        rows=_powers(1, longest)[::2],
        head_rows=(1, 16),
        chunks=(*((n, 0) for n in _powers(64, longest)[::2]), (64, 64)),
        batches=(1, 8),
        contexts=_powers(64, longest)[::2],
        collective_bytes=(4096, 1 << 20),
        repeats=3,
    )


def _powers(first: int, last: int) -> tuple[int, ...]:
    powers = []
    while first <= last:
        powers.append(first)
        first *= 2
    return tuple(powers)
