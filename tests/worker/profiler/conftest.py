"""A shape small enough for a test, and a clock that needs no time."""

from dataclasses import dataclass, field, replace

import pytest

from cleave.perf.model import model_shape
from cleave.perf.model.experts import Experts

pytest.importorskip("torch", reason="torch comes with the engine")


@pytest.fixture
def shape() -> model_shape.ModelShape:
    return model_shape.ModelShape(
        name="small",
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=128,
        max_model_len=1024,
        intermediate_size=96,
        has_gated_mlp=True,
    )


@pytest.fixture
def sparse(shape: model_shape.ModelShape) -> model_shape.ModelShape:
    experts = Experts(8, 2, 32, shared_intermediate_size=32, dense_layers=1)
    return replace(shape, name="sparse", experts=experts)


@dataclass
class Counted:
    """A clock that runs every operator once and says 1 ms, 2 ms, ..."""

    device: object = None
    results: list[object] = field(default_factory=list)

    def measure(self, run, repeats: int) -> list[float]:
        self.results.append(run(0))
        return [float(len(self.results))] * repeats


@pytest.fixture
def clock() -> Counted:
    import torch

    return Counted(torch.device("cpu"))
