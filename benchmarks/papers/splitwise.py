"""Splitwise's clusters of equal power, of equal cost and of equal throughput.

Called by run.py. BLOOM-176B on eight GPUs, the measurements that Splitwise published (its figure 16
is of that model), costs and powers of its table V, the nine slowdowns of its table VI, both Azure
services. What is hard: the authors' simulator looks up the time of a decode iteration by its number
of requests in a table by prompt tokens (performance_model.py, `get_iteration_duration`: a request
counts as one token, and a batch of 64 with 512 tokens each was measured at 32,768), so that batches
and contexts cost next to nothing. `explain` repeats the comparison with iterations counted so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from facts import DESIGNS, Design
from testbeds import A100, H100, build_measured

from cleave.api.cluster import Cluster, NetworkSpec, NodeGroup
from cleave.perf.model import model_shape
from cleave.perf.timing import EngineTiming
from cleave.planner.provision.search import (
    PROMPT_BATCH_TOKENS,
    ClusterDesign,
    MachinePair,
    MachineType,
    PairSearch,
    ProvisioningObjective,
    ProvisioningRequest,
)
from cleave.simulator.fleet import Batching, SimulatedFleet, SimulatedPool, SimulatedTransfer
from cleave.traffic import published

from tests.support import splitwise_runs

MODEL = "bloom-176b"
GPUS = 8
POWER = {"A": 1.0, "H": 1.75, "Hcap": 1.23}
COST = {"A": 1.0, "H": 2.35, "Hcap": 2.35}
"""Table V prices a token DGX-H100 at 2.5 in one column and 2.35 in another; 2.35 is used here."""
NUM_H100 = 40
"""Machines of the baseline whose power, cost or throughput the others have."""
KINDS = {"AA": ("A", "A"), "HH": ("H", "H"), "HA": ("H", "A"), "HHcap": ("H", "Hcap")}
TRANSFER_MS = {"A": 8.0, "H": 5.0, "Hcap": 5.0}
"""Of the part that computing does not hide (section VI-A)."""
CODE, CONVERSATION = "azure-code", "azure-conversation"
MAX_BATCH = 512
STEP_TOKENS = 128
MAX_TOKENS = 32_768
"""Batches of the authors' runs, and their table of iteration times."""


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


@dataclass(frozen=True, slots=True)
class Cause:
    """Splitwise-AA beside the baseline of as many A100 machines, conversation."""

    change: str
    baseline: float
    """req/s."""
    paper_split: float
    """req/s of the paper's numbers of prompt and token machines."""


@dataclass(frozen=True, slots=True)
class WholePrompts(MachinePair):
    """Mixed machines where any number of whole prompts joins the decoding requests; in the authors'
    simulator and in `cleave provision` an iteration has at most 2,048 tokens."""

    def build_fleet(self, num_prompt: int, num_token: int) -> SimulatedFleet:
        engine = self.prompt.build_engine(Batching.ORCA_PAGED, PROMPT_BATCH_TOKENS)
        return SimulatedFleet(mixed=(SimulatedPool(engine, num_prompt),))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One design, conversation; each figure is a multiple of Baseline-H100's."""

    table: str
    name: str
    prompt: int
    token: int
    rate: float
    power: float
    cost: float
    machines: float


def designs() -> list[Row]:
    """Equal power, both services; the baselines, whose machines are all mixed, first."""
    return [
        row
        for service in (CODE, CONVERSATION)
        for row in (*_baselines(service), *(_row(service, design) for design in DESIGNS))
    ]


def explain() -> list[Cause]:
    """What the paper's factor for equal power hangs on."""
    (design,) = (each for each in DESIGNS if each.name == "AA")
    ours, theirs = _machine("A"), _count_as_authors()
    capped, whole = (kind("baseline", ours, None) for kind in (MachinePair, WholePrompts))
    return [
        _compare("roles are kept", design, capped, lends=False),
        _compare("idle machines help", design, capped),
        _compare("the baseline computes whole prompts", design, whole),
        _compare("iterations as the authors count", design, replace(capped, prompt=theirs)),
        _compare("both", design, replace(whole, prompt=theirs)),
    ]


def compare_clusters() -> list[Comparison]:
    """Figures 18b, 19a and 19b: equal cost, and equal throughput at least power and least cost."""
    baseline = _pair("baseline H100", "H", None)
    power, cost = NUM_H100 * POWER["H"], NUM_H100 * COST["H"]
    (reference,) = _search_all([baseline], max_power_watts=power)
    pairs = [_pair("baseline A100", "A", None), *(_pair(name, *KINDS[name]) for name in KINDS)]
    least = ProvisioningObjective
    tables = {
        "equal power": _search_all(pairs, max_power_watts=power),
        "equal cost": _search_all(pairs, max_cost_per_hour=cost),
        "equal throughput, least power": _search_all(pairs, least.POWER, rate=reference.rate),
        "equal throughput, least cost": _search_all(pairs, least.COST, rate=reference.rate),
    }
    return [
        Comparison(
            table,
            each.name,
            each.num_prompt,
            each.num_token,
            each.rate / reference.rate,
            each.power_watts / power,
            each.cost_per_hour / cost,
            each.machines / NUM_H100,
        )
        for table, found in tables.items()
        for each in found
    ]


def _baselines(service: str) -> list[Row]:
    rows = []
    for kind in ("A", "H"):
        search = _search(service, _pair(f"baseline {kind}100", kind, None))
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
    search = _search(service, _pair(design.name, *KINDS[design.name]))
    found = search.maximize_throughput()
    theirs = design.code if service == CODE else design.conversation
    return Row(
        service,
        design.name,
        None if found is None else Cell(found.num_prompt, found.num_token, found.rate),
        Cell(*theirs, _find_rate(search, *theirs)),
    )


def _compare(change: str, design: Design, mixed: MachinePair, *, lends: bool = True) -> Cause:
    transfer = SimulatedTransfer(latency_ms=TRANSFER_MS["A"])
    split = MachinePair(design.name, mixed.prompt, mixed.prompt, transfer, lends)
    prompt, token = design.conversation
    rates = (
        _find_rate(_search(CONVERSATION, pair, mixed.prompt), *counts)
        for pair, counts in ((mixed, (prompt + token, 0)), (split, (prompt, token)))
    )
    return Cause(change, *rates)


def _search_all(
    pairs: list[MachinePair],
    objective: ProvisioningObjective = ProvisioningObjective.THROUGHPUT,
    **limits: float,
) -> list[ClusterDesign]:
    return [
        found
        for pair in pairs
        if (found := _find(_search(CONVERSATION, pair, objective=objective, **limits))) is not None
    ]


def _find(search: PairSearch) -> ClusterDesign | None:
    if search.request.objective is ProvisioningObjective.THROUGHPUT:
        return search.maximize_throughput()
    return search.find_cheapest()


def _find_rate(search: PairSearch, prompt: int, token: int) -> float:
    bound = search.compute_rate_bound(prompt, token) * 1.05
    return search.find_highest_rate(prompt, token, 0.0, bound)


def _search(
    service: str,
    pair: MachinePair,
    reference: MachineType | None = None,
    objective: ProvisioningObjective = ProvisioningObjective.THROUGHPUT,
    **limits: float,
) -> PairSearch:
    question = ProvisioningRequest(
        demand=published.get_workload(service).build_demand(1.0, 1.0),
        pairs=(pair,),
        reference=(reference or _machine("A")).estimate.timing,
        objective=objective,
    )
    limits = limits or {"max_power_watts": NUM_H100 * POWER["H"]}
    return PairSearch(replace(question, **limits), pair)


def _pair(name: str, prompt: str, token: str | None) -> MachinePair:
    if token is None:
        return MachinePair(name, _machine(prompt), None)
    transfer = SimulatedTransfer(latency_ms=max(TRANSFER_MS[prompt], TRANSFER_MS[token]))
    return MachinePair(name, _machine(prompt), _machine(token), transfer)


def _machine(kind: str) -> MachineType:
    """Capped machines only decode, which half the power does not slow down (figure 9)."""
    gpu = A100 if kind == "A" else H100
    cluster = Cluster(nodes=[NodeGroup(gpu=gpu)], network=NetworkSpec())
    estimator = build_measured(model_shape.load_shape(MODEL), cluster)
    estimate = estimator.estimate(gpu, GPUS, 1)
    assert estimate is not None
    own = replace(estimate, cost_per_hour=COST[kind], power_watts=POWER[kind])
    return MachineType(f"DGX-{kind}", own)


def _count_as_authors() -> MachineType:
    """An A100 machine whose iterations cost what a prompt of as many tokens as requests would."""
    machine = _machine("A")
    profile = splitwise_runs.find_profile("bloom", A100, GPUS)
    assert profile is not None
    prompts = {}
    for point in profile.prefill:
        prompts.setdefault(point.prompts * point.tokens, []).append(point.ms)
    tokens = sorted(prompts)
    medians = [float(np.median(prompts[each])) for each in tokens]
    slope = (medians[1] - medians[0]) / (tokens[1] - tokens[0])
    start = medians[0] - slope * tokens[0]
    steps = np.arange(0, MAX_TOKENS + 1, STEP_TOKENS)
    singles = {point.context_tokens: point.ms for point in profile.decode if point.batch == 1}
    timing = EngineTiming(
        prompt_step=float(STEP_TOKENS),
        prompt_ms=tuple(np.interp(steps, [0, *tokens], [start, *medians]).tolist()),
        prompt_square_ms=0.0,
        decode_ms=tuple(np.interp(range(MAX_BATCH + 1), *_sort(singles)).tolist()),
        decode_context_ms=(0.0,),
    )
    return replace(machine, estimate=replace(machine.estimate, timing=timing))


def _sort(points: dict[int, float]) -> Iterator[list[float]]:
    yield sorted(points)
    yield [points[each] for each in sorted(points)]
