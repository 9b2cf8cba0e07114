"""What plans print as their trust is what benchmarks published."""

import re
from collections.abc import Iterator
from pathlib import Path

from cleave.perf import known_errors
from cleave.perf.known_errors import ServingErrors, Spread

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPREAD = re.compile(r"([\d.]+)% \((?:P90 )?(\d+)%\)")


def read_spreads(text: str) -> Iterator[Spread]:
    for median, high in SPREAD.findall(text):
        yield Spread(round(float(median) / 100, 4), int(high) / 100)


def test_kernels_and_roofline_have_the_published_errors() -> None:
    text = (BENCHMARKS / "prices/README.md").read_text()
    rows = re.findall(r"^\| (tables|roofline) \| (\S+) \| \d+ \| (.*) \| (.*)\|$", text, re.M)
    published = {
        (source, gpu): ServingErrors(next(read_spreads(tpot)), next(read_spreads(ttft), None))
        for source, gpu, tpot, ttft in rows
    }
    sources = {"tables": known_errors.KERNELS, "roofline": known_errors.ROOFLINE}
    assert published == {
        (source, gpu): errors for source, known in sources.items() for gpu, errors in known.items()
    }


def test_operators_have_the_published_errors() -> None:
    text = (BENCHMARKS / "references/README.md").read_text()
    (line,) = re.findall(r"^All [\d,]+ requests: .*$", text, re.M)
    ttft, tpot = read_spreads(line)
    assert ServingErrors(tpot, ttft) == known_errors.OPERATORS
