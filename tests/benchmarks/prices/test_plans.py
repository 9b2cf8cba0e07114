"""The comparison of plans."""

from collections.abc import Callable
from types import ModuleType

Import = Callable[[str], ModuleType]


def test_the_old_estimator_is_slower_and_has_the_same_memory(module: Import) -> None:
    plans = module("plans")
    spec = {"slo": plans.SLO, "workload": {"rate": 10, **plans.LENGTHS}}
    now = plans.build_problem("meta-llama/Llama-3.1-8B-Instruct", "H200", spec).estimator
    old = plans.BeforeEstimator(now.shape, now.machines)
    new_estimate, old_estimate = (each.estimate("H200-SXM-141GB", 1, 1) for each in (now, old))
    assert old_estimate.kv_capacity_tokens == new_estimate.kv_capacity_tokens
    before_ms = old_estimate.timing.predict_decode_ms(16, 16_000)
    assert before_ms > 1.2 * new_estimate.timing.predict_decode_ms(16, 16_000)
