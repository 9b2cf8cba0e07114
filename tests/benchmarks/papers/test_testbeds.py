"""The testbeds of the papers."""

from collections.abc import Callable
from types import ModuleType

import pytest

from cleave.api.cluster import Cluster, NodeGroup
from cleave.perf.model import model_shape

from tests.support import splitwise_runs

Import = Callable[[str], ModuleType]


@pytest.mark.parametrize("name", ["bloom", "llama-2-70b"])
def test_the_papers_engines_take_the_time_that_was_measured_then(module: Import, name: str) -> None:
    testbeds = module("testbeds")
    shape, cluster = model_shape.load_shape(name), Cluster(nodes=[NodeGroup(gpu=testbeds.H100)])
    found = testbeds.build_measured(shape, cluster).estimate(testbeds.H100, 8, 1)
    measured = splitwise_runs.find_profile(name, testbeds.H100, 8)
    assert found is not None
    assert measured is not None
    for point in measured.decode[:3]:
        predicted = found.timing.predict_decode_ms(point.batch, point.context_tokens)
        assert predicted == pytest.approx(point.ms, rel=0.1)
