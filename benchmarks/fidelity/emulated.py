"""Emulated fleets: OPT-13B on A100 as DistServe measured it, and the same for the simulator."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments import Case, Stage
from fleet import make_fleet
from idle import find_dispatch, fit_transfer, measure_idle, read_idle
from iteration_times import PassScale

from cleave.perf import named_profiles
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedTransfer

CASES = (Case(prefill=1, decode=1), Case(prefill=2, decode=2), Case(mixed=2))
PROFILE = "distserve/opt-13b/tp1"
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Emulated:
    """One emulated fleet and its twin."""

    case: Case
    time_scale: float
    kind: str = "emulated"
    model: str = "opt-13b"
    length_scale: float = 1.0
    max_model_len: int = 8192

    def spec(self, folder: Path) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement."""
        return {
            "model": {
                "source": f"facebook/{self.model}",
                "servedName": self.model,
                "maxModelLen": self.max_model_len,
            },
            "slo": {"ttftMs": 1000, "tpotMs": 60},
            "engine": {
                "type": "Emulated",
                "args": ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)],
                "emulated": {"latency": PROFILE, "timeScale": self.time_scale},
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
        idle = read_idle(folder / "idle.json")
        transfer = fit_transfer(idle) if self.case.decode else SimulatedTransfer()
        dispatch_ms = find_dispatch(idle, self.case.ways)
        return make_fleet(self.case, engine, transfer, dispatch_ms)
