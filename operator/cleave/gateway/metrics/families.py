"""Metric families, and their page in Prometheus' text format. Pure.

Objects of prometheus_client take 7 us for a line, and a page may have hundreds of thousands: one
for each model, role and bucket. So a family makes its lines while the page is written, and the page
is written in time slices. What is hard: the counts go on meanwhile. So whoever makes a family
copies the keys first, and the lines of one histogram are made together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.utils import floatToGoString

from cleave.time_slices import Steps

PIECE_BYTES = 16 << 10
"""Approximate size of the pieces of a page."""

Key = str | tuple[str, ...]
"""Values of a series' labels; of a single label, its value."""
Series = Iterable[tuple[Key, float]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its series."""

    name: str
    """As on the page, but for the suffixes of a histogram."""
    text: str
    kind: str
    labels: tuple[str, ...]
    lines: Iterable[str]
    """One or more lines each, with their line ends; can be iterated over once."""


def build_counter(name: str, text: str, series: Series, *labels: str) -> Family:
    """A counter, whose name gets the suffix `_total`."""
    name = f"{name}_total"
    return Family(name, text, "counter", labels, _write_series(name, labels, series))


def build_gauge(name: str, text: str, series: Series, *labels: str) -> Family:
    """A gauge."""
    return Family(name, text, "gauge", labels, _write_series(name, labels, series))


def build_histogram(
    name: str,
    text: str,
    bounds: Sequence[float],
    rows: Iterable[tuple[Key, Sequence[float], float | None]],
    *labels: str,
) -> Family:
    """A histogram. `rows`: labels, counts by bucket, sum; None: there is none, nor a count."""
    lines = (_write_histogram(name, labels, bounds, *row) for row in rows)
    return Family(name, text, "histogram", labels, lines)


def write_page(families: Iterable[Family]) -> Steps[list[bytes]]:
    """The page, in pieces."""
    pieces: list[bytes] = []
    lines: list[str] = []
    size = 0
    for family in families:
        yield
        lines.append(f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}\n")
        for line in family.lines:
            lines.append(line)
            size += len(line)
            if size > PIECE_BYTES:
                pieces.append("".join(lines).encode())
                lines.clear()
                size = 0
            yield
    return [*pieces, "".join(lines).encode()]


def format_labels(names: Sequence[str], key: Key, further: str = "") -> str:
    """`{model="m",role="prefill"}`, sorted by name; empty without labels. `further`: another
    label that comes before them."""
    values = (key,) if isinstance(key, str) else key
    pairs = sorted(zip(names, values, strict=True))
    labels = [*([further] if further else ()), *(f'{n}="{_format_label(v)}"' for n, v in pairs)]
    return f"{{{','.join(labels)}}}" if labels else ""


def _format_number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _format_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _write_series(name: str, labels: Sequence[str], series: Series) -> Iterator[str]:
    for key, value in series:
        yield f"{name}{format_labels(labels, key)} {_format_number(value)}\n"


def _write_histogram(
    name: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    key: Key,
    counts: Sequence[float],
    total: float | None,
) -> str:
    # `le` is sorted before all labels that there are.
    rest = format_labels(labels, key).removeprefix("{")
    after = f",{rest}" if rest else "}"
    counted = list(accumulate(counts))
    texts = *map(_format_number, bounds), "+Inf"
    lines = [
        f'{name}_bucket{{le="{bound}"{after} {_format_number(count)}\n'
        for bound, count in zip(texts, counted, strict=True)
    ]
    if total is not None:
        plain = f"{{{rest}" if rest else ""
        lines.append(f"{name}_count{plain} {_format_number(counted[-1])}\n")
        lines.append(f"{name}_sum{plain} {_format_number(total)}\n")
    return "".join(lines)
