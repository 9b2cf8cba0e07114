"""Days of moving traffic: how long which requests come, and what the planner gets of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cleave.api.manifest import validate
from cleave.planner import problem_from_profile
from cleave.planner.problem import Problem
from cleave.simulator.trace import Trace
from cleave.traffic.published import get_workload
from cleave.traffic.workload import Demand

TTFT_MS, TPOT_MS = 2_500.0, 60.0
LONGEST = 8_192
MOST_GPUS = 24
_SEEDS = 1_000
"""Of one day; phases take them one after the other."""


@dataclass(frozen=True)
class Phase:
    """Traffic that lasts for a while."""

    name: str
    workload: str
    rate: float
    burstiness: float = 1.0

    @property
    def demand(self) -> Demand:
        """As the planner takes it."""
        return (
            get_workload(self.workload)
            .build_demand(self.rate, self.burstiness)
            .with_max_model_len(LONGEST)
        )


Phases = Sequence[Phase]

DAYS: dict[str, Phases] = {
    "day": (
        Phase("code", "azure-code", 8.0),
        Phase("conversation", "azure-conversation", 8.0),
        Phase("twice as much", "azure-conversation", 16.0),
        Phase("bursts", "azure-conversation", 12.0, burstiness=4.0),
        Phase("code again", "azure-code", 14.0),
        Phase("night", "azure-code", 3.0),
    ),
    "swapped": (
        Phase("conversation", "azure-conversation", 8.0),
        Phase("code", "azure-code", 8.0),
        Phase("twice as much", "azure-code", 16.0),
        Phase("bursts", "azure-code", 12.0, burstiness=4.0),
        Phase("conversation again", "azure-conversation", 14.0),
        Phase("night", "azure-conversation", 3.0),
    ),
    "small": (
        Phase("conversation", "azure-conversation", 5.0),
        Phase("bursts", "azure-conversation", 6.0, burstiness=2.5),
        Phase("code", "azure-code", 6.0),
        Phase("half as much", "azure-code", 3.0),
        Phase("conversation again", "azure-conversation", 9.0),
        Phase("some more", "azure-conversation", 11.0),
    ),
}
"""`swapped` is the first one with each service in the other's place; `small` has smaller steps."""


def ask(first: Phase, keeps_targets: bool = False) -> Problem:
    """What the deployment states: the first phase. `keeps_targets`: engines schedule by its
    targets."""
    engine: dict[str, object] = {"type": "Emulated"}
    if keeps_targets:
        engine["scheduling"] = {"order": "InTimeFirst", "admission": "WithinTpot"}
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "day"},
        "spec": {
            "model": {"source": "facebook/opt-13b", "maxModelLen": LONGEST},
            "slo": {"ttftMs": TTFT_MS, "tpotMs": TPOT_MS},
            "engine": engine,
            "pools": {"flipping": "Off"},
            "planning": {"disaggregation": "Always", "maxGPUs": MOST_GPUS},
            "workload": {
                "rate": 1,
                "promptTokens": {"mean": 1000, "p90": 2000},
                "outputTokens": {"mean": 100, "p90": 200},
            },
        },
    }
    return for_phase(problem_from_profile.build_problem(validate(document)), first)


def for_phase(problem: Problem, phase: Phase) -> Problem:
    """The same with the traffic of a phase."""
    return replace(problem, demand=phase.demand)


def draw(phases: Phases, phase_s: float, seed: int = 0) -> Trace:
    """The whole day."""
    arrivals, prompts, outputs = [], [], []
    for number, phase in enumerate(phases):
        drawn = phase.demand.draw(int(phase_s * phase.rate * 2) + 100, seed=seed * _SEEDS + number)
        came = drawn.arrival_ms < phase_s * 1000
        arrivals.append(drawn.arrival_ms[came] + number * phase_s * 1000)
        prompts.append(drawn.prompt_tokens[came])
        outputs.append(drawn.output_tokens[came])
    return Trace(np.concatenate(arrivals), np.concatenate(prompts), np.concatenate(outputs))
