"""DistServe's Table 2: attainments of OPT-13B on ShareGPT, real, simulated there, simulated here.

Called by run.py. The fleet is that of the table: vLLM on one GPU, DistServe-Low with its placement
(prefill TP 2, decode TP 1). Neither the lengths nor the coefficients behind the table were
published, and it does not say whether its rates are per GPU; both readings are simulated.
"""

from dataclasses import dataclass

from facts import ATTAINMENTS, PLACEMENTS, Attainments

from cleave.perf.named_profiles import to_timing
from cleave.perf.published.distserve import FITS, KV_CAPACITY_TOKENS
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.traffic import published

MODEL, WORKLOAD = "opt-13b", "sharegpt"
TARGETS_MS = (200.0, 100.0)
NUM_REQUESTS = 10_000
SATURATION_TOKENS = 512
"""DistServe's L_m for 13B on an A100 (section 3.1)."""


@dataclass(frozen=True, slots=True)
class Row:
    """Attainments in percent."""

    paper: Attainments
    vllm: float
    distserve: float
    """Rate of the whole system."""
    distserve_per_gpu: float
    """Rate per GPU."""


def compare() -> list[Row]:
    prefill, decode = PLACEMENTS[MODEL, WORKLOAD]
    vllm = SimulatedFleet(mixed=(SimulatedPool(_engine("vllm", (1, 1), 1 << 14), 1),))
    distserve = SimulatedFleet(
        prefill=(SimulatedPool(_engine("distserve", prefill, SATURATION_TOKENS), 1),),
        decode=(SimulatedPool(_engine("distserve", decode, SATURATION_TOKENS), 1),),
        first_token_by_decode=False,
    )
    gpus = prefill[0] * prefill[1] + decode[0] * decode[1]
    return [
        Row(
            paper=row,
            vllm=_attainment(vllm, row.rate),
            distserve=_attainment(distserve, row.rate),
            distserve_per_gpu=_attainment(distserve, row.rate * gpus),
        )
        for row in ATTAINMENTS
    ]


def _attainment(fleet: SimulatedFleet, rate: float) -> float:
    demand = published.get_workload(WORKLOAD).build_demand(rate)
    return 100 * simulate(fleet, demand.draw(NUM_REQUESTS)).compute_attainment(*TARGETS_MS)


def _engine(engine: str, size: tuple[int, int], max_num_batched_tokens: int) -> SimulatedEngine:
    return SimulatedEngine(
        timing=to_timing(FITS[f"{engine}/{MODEL}/tp{size[0]}"], size[1]),
        kv_capacity_tokens=KV_CAPACITY_TOKENS[MODEL][size],
        batching=Batching.PREFILL_FIRST,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=False,
    )
