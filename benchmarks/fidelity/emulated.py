"""Emulated fleets: OPT-13B on A100 as DistServe measured it, and the same for the simulator."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare import Slo
from deployments import Case, Stage
from fleet import make_fleet
from idle import find_dispatch, fit_transfer, measure_idle, read_idle
from iteration_times import PassScale

from cleave.api.enums import DispatchPolicy
from cleave.perf import named_profiles
from cleave.perf.published import aladdin
from cleave.perf.timing import EngineTiming
from cleave.policy.best_fit import BestFitModel
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import (
    Admission,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedTransfer,
)

CASES = (Case(prefill=1, decode=1), Case(prefill=2, decode=2), Case(mixed=2))
PROFILE = "distserve/opt-13b/tp1"
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 2048
TTFT_MS, TPOT_MS = 1000.0, 60.0
"""Targets of the deployment, in milliseconds of the trace: best fit fills instances up to them."""


@dataclass(frozen=True, slots=True)
class Emulated:
    """One emulated fleet and its twin."""

    case: Case
    time_scale: float
    policy: DispatchPolicy = DispatchPolicy.PREFIX_AWARE
    flips: bool = False
    """Whether instances of a pair of pools flip roles; only where a ms of the trace takes one."""
    keeps_targets: bool = False
    """Whether engines schedule by the deployment's targets (InTimeFirst, WithinTpot)."""
    kind: str = "emulated"
    model: str = "opt-13b"
    length_scale: float = 1.0
    max_model_len: int = 8192
    block_size: int = BLOCK_SIZE

    @property
    def targets(self) -> Slo | None:
        """Those of the deployment where they decide what is served when. And best fit brings the
        times of most requests just below them, so a percentile is among many equal times, where a
        difference of a percent decides."""
        is_filled = self.policy is DispatchPolicy.BEST_FIT or self.keeps_targets
        return Slo(TTFT_MS, TPOT_MS) if is_filled else None

    def spec(self, folder: Path) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement."""
        by_targets = {"order": "InTimeFirst", "admission": "WithinTpot"}
        scheduling = {"scheduling": by_targets} if self.keeps_targets else {}
        return {
            "model": {
                "source": f"facebook/{self.model}",
                "servedName": self.model,
                "maxModelLen": self.max_model_len,
            },
            "slo": {"ttftMs": TTFT_MS * self.time_scale, "tpotMs": TPOT_MS * self.time_scale},
            "routing": {"policy": self.policy.value},
            "pools": {"flipping": "Auto" if self.flips else "Off"},
            "engine": {
                "type": "Emulated",
                "args": ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)],
                "emulated": {"latency": PROFILE, "timeScale": self.time_scale},
                **scheduling,
            },
        }

    def prepare(self, stage: Stage, folder: Path) -> None:
        """Times of an idle fleet: they show what HTTP, the gateway and pulls cost."""
        measure_idle(stage, self.model, self.time_scale, folder / "idle.json")

    def timing(self, folder: Path) -> EngineTiming:
        """The latencies that the engines were given."""
        return named_profiles.load_profile(PROFILE).timing

    def twin(self, folder: Path, pass_scale: PassScale) -> SimulatedFleet:
        """The same engines for the simulator; ways and pulls from an idle fleet."""
        profile = named_profiles.load_profile(PROFILE)
        engine = SimulatedEngine(
            pass_scale.apply(profile.timing),
            profile.kv_capacity_tokens // BLOCK_SIZE * BLOCK_SIZE,
            BLOCK_SIZE,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
        )
        if self.keeps_targets:
            order, admission = PrefillOrder.IN_TIME, Admission.WITHIN_TPOT
            engine = replace(
                engine, order=order, admission=admission, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS
            )
        idle = read_idle(folder / "idle.json")
        transfer = fit_transfer(idle) if self.case.decode else SimulatedTransfer()
        dispatch_ms = find_dispatch(idle, self.case.ways)
        fleet = make_fleet(self.case, engine, transfer, dispatch_ms)
        if self.flips and self.case.prefill:
            fleet = replace(fleet, flipping=build_thresholds(TTFT_MS))
        if self.policy is not DispatchPolicy.BEST_FIT:
            # Matters where prompts repeat.
            return replace(fleet, dispatch=self.policy, pulls_prefixes=bool(self.case.prefill))
        model = fit_best_fit(engine.timing)
        return replace(fleet, dispatch=self.policy, best_fit=model)


def fit_best_fit(timing: EngineTiming) -> BestFitModel:
    """Best fit with the iteration times that a gateway learns from such engines."""
    coefficients = aladdin.fit_timings(timing, timing)
    if coefficients is None:
        raise ValueError("the engine's times do not rise with prompts and contexts; fit another")
    return BestFitModel(coefficients, TTFT_MS, TPOT_MS)
