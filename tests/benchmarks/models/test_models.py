"""Cleave's dimensions of models of 2026 are those recorded of the pinned vLLM."""

from collections.abc import Callable
from types import ModuleType

Import = Callable[[str], ModuleType]

LEAST_SHARE_OF_WEIGHTS = 0.998
"""Cleave counts no norms, biases and scales of blocks."""
NOT_COMPARED = {"moonshotai/Kimi-Linear-48B-A3B-Instruct"}
"""vLLM imports kernels for it that are not installed here."""
CACHES = (
    *("kv_bytes_per_token", "window_bytes_per_token", "window_tokens", "state_bytes"),
    "mtp_kv_bytes_per_token",
)


def test_caches_are_those_of_vllm_and_weights_nearly(module: Import) -> None:
    run = module("run")
    configs, recorded = run.read_configs(), run.read_recorded()
    assert configs.keys() - recorded.keys() == NOT_COMPARED
    assert len(recorded) >= 20
    for name, theirs in recorded.items():
        ours = run.compute_allocation(run.build_shape(name, configs[name]))
        for field in CACHES:
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
        assert LEAST_SHARE_OF_WEIGHTS < ours.weight_bytes / theirs.weight_bytes <= 1, name
        if theirs.mtp_weight_bytes or ours.mtp_weight_bytes:
            share = ours.mtp_weight_bytes / theirs.mtp_weight_bytes
            assert LEAST_SHARE_OF_WEIGHTS < share <= 1, name


def test_the_table_for_readers_is_up_to_date(module: Import) -> None:
    run = module("run")
    assert run.build_table(run.read_recorded()) in run.README.read_text()
