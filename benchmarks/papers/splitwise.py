"""Splitwise's clusters with the power of 40 DGX-H100: how many prompt and token machines.

Called by run.py. BLOOM-176B on eight GPUs, the measurements that Splitwise published (its figure 16
is of that model), costs and powers of its table V, the nine slowdowns of its table VI, both Azure
services. Machines keep their role here, where Splitwise lends them to a mixed pool.
"""

from dataclasses import dataclass, replace

from facts import DESIGNS, Design
from testbeds import A100, H100

from cleave.api.cluster import Cluster, NetworkSpec, NodeGroup
from cleave.perf.estimator import build_estimator
from cleave.perf.model import model_shape
from cleave.planner.provision.search import (
    MachinePair,
    MachineType,
    PairSearch,
    ProvisioningObjective,
    ProvisioningRequest,
)
from cleave.simulator.fleet import SimulatedTransfer
from cleave.traffic import published

MODEL = "bloom-176b"
GPUS = 8
POWER = {"A": 1.0, "H": 1.75, "Hcap": 1.23}
COST = {"A": 1.0, "H": 2.35, "Hcap": 2.35}
"""Table V prices a token DGX-H100 at 2.5 in one column and 2.35 in another; 2.35 is used here."""
BUDGET = 40 * POWER["H"]
KINDS = {"AA": ("A", "A"), "HH": ("H", "H"), "HA": ("H", "A"), "HHcap": ("H", "Hcap")}
TRANSFER_MS = {"A": 8.0, "H": 5.0, "Hcap": 5.0}
"""Of the part that computing does not hide (section VI-A)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One design for one service."""

    prompt: int
    token: int
    rate: float
    """Highest that holds all nine slowdowns, req/s."""


@dataclass(frozen=True, slots=True)
class Row:
    """One design."""

    service: str
    name: str
    ours: Cell | None
    """The best split of the budget."""
    paper: Cell | None
    """The paper's split, simulated here."""


def designs() -> list[Row]:
    """Both services; the baselines, whose machines are all mixed, first."""
    return [
        row
        for service in ("azure-code", "azure-conversation")
        for row in (*_baselines(service), *(_row(service, design) for design in DESIGNS))
    ]


def _baselines(service: str) -> list[Row]:
    rows = []
    for kind in ("A", "H"):
        search = _search(service, MachinePair(f"baseline {kind}100", _machine(kind), None))
        found = search.maximize_throughput()
        rows.append(
            Row(
                service,
                search.pair.name,
                None if found is None else Cell(found.num_prompt, 0, found.rate),
                None,
            )
        )
    return rows


def _row(service: str, design: Design) -> Row:
    prompt, token = KINDS[design.name]
    transfer = SimulatedTransfer(latency_ms=max(TRANSFER_MS[prompt], TRANSFER_MS[token]))
    search = _search(service, MachinePair(design.name, _machine(prompt), _machine(token), transfer))
    found = search.maximize_throughput()
    theirs = design.code if service == "azure-code" else design.conversation
    rate = search.find_highest_rate(*theirs, 0.0, search.compute_rate_bound(*theirs) * 1.05)
    return Row(
        service,
        design.name,
        None if found is None else Cell(found.num_prompt, found.num_token, found.rate),
        Cell(*theirs, rate),
    )


def _search(service: str, pair: MachinePair) -> PairSearch:
    question = ProvisioningRequest(
        demand=published.get_workload(service).build_demand(1.0, 1.0),
        pairs=(pair,),
        reference=_machine("A").estimate.timing,
        objective=ProvisioningObjective.THROUGHPUT,
        max_power_watts=BUDGET,
    )
    return PairSearch(question, pair)


def _machine(kind: str) -> MachineType:
    """Capped machines only decode, which half the power does not slow down (figure 9)."""
    gpu = A100 if kind == "A" else H100
    cluster = Cluster(nodes=[NodeGroup(gpu=gpu)], network=NetworkSpec())
    estimator = build_estimator(model_shape.load_shape(MODEL), cluster)
    estimate = estimator.estimate(gpu, GPUS, 1)
    assert estimate is not None
    own = replace(estimate, cost_per_hour=COST[kind], power_watts=POWER[kind])
    return MachineType(f"DGX-{kind}", own)
