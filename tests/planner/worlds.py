"""Problems whose answers are known: DistServe's measured instances on nodes of A100."""

import math
from dataclasses import dataclass

from cleave.api.deployment import Slo
from cleave.api.planning import Planning
from cleave.perf import distserve
from cleave.perf.estimate import Estimate
from cleave.perf.latency import to_timing
from cleave.perf.link import Link, LinkKind
from cleave.perf.model import load
from cleave.perf.trust import Basis, Trust
from cleave.planner.problem import PAPER, Policies, Problem, Supply
from cleave.planner.workload import Demand, Drawn, Independent, LogNormal, fixed

NVLINK = Link(LinkKind.NVLINK, 300.0)
INFINIBAND = Link(LinkKind.INFINIBAND, 25.0, 5.0)
SLOW_NETWORK = Link(LinkKind.ETHERNET, 25 / 8, 50.0)


@dataclass(frozen=True)
class Fits:
    """DistServe's coefficients; all kinds of GPU are alike apart from `slower`."""

    engine: str = "distserve"
    model: str = "opt-13b"
    power_watts: float = 400.0
    price_per_hour: float = 2.0

    def estimate(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> Estimate | None:
        size = tensor_parallel_size, pipeline_parallel_size
        fit = distserve.FITS.get(f"{self.engine}/{self.model}/tp{tensor_parallel_size}")
        capacity = distserve.KV_CAPACITY_TOKENS[self.model].get(size)
        if fit is None or capacity is None:
            return None
        shape = load(self.model)
        return Estimate(
            timing=to_timing(fit, pipeline_parallel_size),
            kv_capacity_tokens=capacity,
            prefill_saturation_tokens=512,
            max_model_len=shape.max_model_len,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            flops_per_token=shape.flops_per_token,
            power_watts=self.power_watts * math.prod(size),
            cost_per_hour=self.price_per_hour * math.prod(size),
            trust=Trust(Basis.FITTED, "DistServe's coefficients", 0.1),
        )

    def why_not(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> str | None:
        size = tensor_parallel_size, pipeline_parallel_size
        return None if self.estimate(gpu, *size) else f"{self.model}: no fit for {size}"


def a100(num_nodes: int = 4, network: Link = INFINIBAND, gpus_per_node: int = 8) -> Supply:
    return Supply("A100", num_nodes, gpus_per_node, num_nodes * gpus_per_node, NVLINK, network)


def chat(rate: float = 10.0, prompt: float = 330, output: float = 240) -> Demand:
    """Log-normal lengths in the region of ShareGPT's."""
    lengths = Independent(
        LogNormal.through(prompt, prompt * 2.1), LogNormal.through(output, output * 2.0)
    )
    return Demand(rate, Drawn(lengths)).limited(2048)


def problem(
    demand: Demand | None = None,
    slo: Slo | None = None,
    *,
    engine: str = "distserve",
    model: str = "opt-13b",
    supplies: tuple[Supply, ...] | None = None,
    policies: Policies = PAPER,
    planning: Planning | None = None,
    seed: int = 0,
) -> Problem:
    return Problem(
        demand=demand or chat(),
        slo=slo or Slo(ttft_ms=200, tpot_ms=100),
        supplies=supplies or (a100(),),
        shape=load(model),
        estimator=Fits(engine, model),
        planning=planning or Planning(),
        policies=policies,
        seed=seed,
    )


def blog(engine: str = "distserve") -> Problem:
    """The DistServe blog's 13B case: 512 in, 64 out, one A100."""
    return problem(fixed(512, 64, 1.0), Slo(ttft_ms=400, tpot_ms=40, attainment=0.9), engine=engine)
