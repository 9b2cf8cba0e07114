"""Decode iterations from few points and from many."""

import pytest

from cleave.perf.profile import decode_fit
from cleave.perf.profile.profile import DecodePoint
from cleave.perf.timing import EngineTiming

CONTEXTS = (128, 1024, 4096, 16384)


def measure(batch: int, context: int) -> float:
    """Larger batches use the device better: the cost of a token of context falls with the batch."""
    return 5.0 + 0.01 * batch + batch * context * 1e-5 / (1 + batch / 64)


def build_points(batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[DecodePoint]:
    return [
        DecodePoint(batch=b, context_tokens=b * c, ms=measure(b, c))
        for b in batches
        for c in contexts
    ]


def test_many_contexts_give_every_batch_its_own_slope() -> None:
    table, slopes = decode_fit.fit_tables(build_points((1, 16, 64, 256), CONTEXTS))
    timing = EngineTiming(1.0, (0.0, 0.0), 0.0, table, slopes)
    assert slopes[1] > 1.8 * slopes[64] > 3 * slopes[256]
    for batch in (1, 16, 64, 256):
        predicted = timing.predict_decode_ms(batch, batch * 2048)
        assert predicted == pytest.approx(measure(batch, 2048), rel=0.01)


def test_batches_measured_with_one_context_share_a_slope() -> None:
    points = build_points((1,), CONTEXTS) + build_points((2, 4, 8), (1024,))
    _, slopes = decode_fit.fit_tables(points)
    assert len(set(slopes)) == 1
