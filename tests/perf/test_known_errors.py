"""What plans print as their trust is what benchmarks published."""

import re
from pathlib import Path

from cleave.perf import known_errors
from cleave.perf.known_errors import ServingErrors, Spread

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = re.compile(
    r"^\| (tables|roofline|operators|mixed operators) \| (\S+) \| \d+ \| (.*) \| (.*)\|$",
    re.MULTILINE,
)


def read_spread(cell: str) -> Spread | None:
    """Of `12.3% (26%)`."""
    sizes = [float(each) for each in re.findall(r"([\d.]+)%", cell)]
    return Spread(round(sizes[0] / 100, 4), sizes[1] / 100) if sizes else None


def test_every_source_has_the_published_errors() -> None:
    # Where a page has a source twice, the later row holds: pages only grow.
    published = {}
    for folder in ("prices", "references"):
        for source, gpu, *cells in ROW.findall((BENCHMARKS / folder / "README.md").read_text()):
            published[source, gpu] = ServingErrors(*map(read_spread, cells))
    known = {
        "tables": known_errors.KERNELS,
        "roofline": known_errors.ROOFLINE,
        "operators": {"any": known_errors.OPERATORS},
        "mixed operators": {"any": known_errors.MIXED_OPERATORS},
    }
    assert published == {
        (source, gpu): errors for source, rows in known.items() for gpu, errors in rows.items()
    }
