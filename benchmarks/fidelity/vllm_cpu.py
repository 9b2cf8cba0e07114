"""Real vLLM on CPU with a tiny random model, and its twin made from a profile measured here."""

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from cores import part_fronts
from deployments import Case, Stage
from fleet import make_fleet
from idle import find_dispatch, fit_transfer, measure_idle, read_idle
from iteration_times import PassScale

from cleave.local import tiny_model
from cleave.perf import named_profiles
from cleave.perf.profile import profile as profiles
from cleave.perf.profile.profile import MeasuredProfile
from cleave.perf.timing import EngineTiming
from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import EngineInfo, inspect_engine
from cleave.profiling.measurement_plan import ProfilingSettings, SamplesByCase, measure
from cleave.profiling.measurements import DecodeCase, draw_prompt
from cleave.profiling.profile_points import build_profile, list_scattered
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedTransfer

PROFILE = "profile.yaml"
CASES = (Case(mixed=1), Case(prefill=1, decode=1))
SHAPE = tiny_model.TinyModelShape(layers=8, hidden=512, heads=8, kv_heads=4, mlp=1024)
"""Passes of some 5 to 200 ms, as real models have them on GPUs. With the smallest model fronts have
thousands of tokens a second to send, and are what limits the fleet; one whose weights fit the cache
(32 MB here) decodes faster the longer it is let alone; with larger hidden sizes the kernels of two
engines do not fit 24 GB."""
BLOCK_SIZE = 128
"""vLLM's on CPU."""
MAX_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 64
WARM_TOKENS = 600
"""Few of the scaled prompts are longer, and a kernel is a small part of such a pass."""
KERNELS = 65536
"""Compiled kernels that oneDNN keeps; its 1,024 are too few for passes of all lengths."""
FULL = ProfilingSettings(
    repeats=3,
    batches=(1, 2, 4, 8, 16, 32),
    contexts=(64, 256, 1024),
    max_fill_s=10.0,
)
QUICK = ProfilingSettings(repeats=3, batches=(1, 4, 16), contexts=(64, 512), steps_per_octave=1)
SHORT_PROMPTS = 64
"""Longest that are measured where only decoding counts."""
CLOCK = Path(__file__).parent / "engine"
"""Where engines find the scheduler that notes passes."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """One fleet of vLLM engines and its twin."""

    case: Case
    quick: bool
    reuse: bool = False
    """Whether engines find prompts in their prefix caches."""
    shares_cores: bool = False
    """Whether fronts stay on the cores of passes."""
    kind: str = "vllm"
    model: str = "tiny"
    length_scale: float = 0.25
    max_model_len: int = 4096
    block_size: int = BLOCK_SIZE
    time_scale: float = 1.0
    targets: None = None

    def spec(self, folder: Path) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement; passes are noted in `folder`."""
        environment = {
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS),
            "PYTHONPATH": str(CLOCK),
            "FIDELITY_PASSES": str(folder.resolve()),
        }
        return {
            "model": {
                "source": str(_model()),
                "servedName": self.model,
                "dtype": "float32",
                "maxModelLen": self.max_model_len,
            },
            "slo": {"ttftMs": 1000, "tpotMs": 200},
            "engine": {
                "args": [
                    *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
                    *("--max-num-seqs", str(MAX_NUM_SEQS)),
                    *("--scheduler-cls", "fidelity_clock.ClockedScheduler"),
                    *(() if self.reuse else ("--no-enable-prefix-caching",)),
                ],
                "env": [{"name": name, "value": value} for name, value in environment.items()],
            },
        }

    def prepare(self, stage: Stage, folder: Path) -> None:
        """A profile of these engines, and times of the idle fleet."""
        urls = [url for urls in stage.engines.values() for url in urls]
        if not self.shares_cores:
            part_fronts(urls, stage.url)
        asyncio.run(_warm([stage.connect(url, self.model) for url in urls]))
        file = folder / PROFILE
        if not file.exists():
            profiles.write_profile(asyncio.run(self._profile(stage)), file)
        measure_idle(stage, self.model, self.time_scale, folder / "idle.json")

    def timing(self, folder: Path) -> EngineTiming:
        """As profiled."""
        return named_profiles.load_profile(str(folder / PROFILE)).timing

    def twin(self, folder: Path, pass_scale: PassScale) -> SimulatedFleet:
        """Engines as profiled; ways and pulls from an idle fleet."""
        profile = named_profiles.load_profile(str(folder / PROFILE))
        engine = SimulatedEngine(
            pass_scale.apply(profile.timing),
            profile.kv_capacity_tokens,
            BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            prefix_caching=self.reuse,
        )
        idle = read_idle(folder / "idle.json")
        transfer = SimulatedTransfer()
        if self.case.decode:
            transfer = replace(
                fit_transfer(idle),
                receiver_ms=pass_scale.pull_ms,
                receiver_token_ms=pass_scale.pull_block_ms / BLOCK_SIZE,
            )
        return make_fleet(self.case, engine, transfer, find_dispatch(idle, self.case.ways))

    async def _profile(self, stage: Stage) -> MeasuredProfile:
        """Of a pair: prompts on one engine and, at the same time, decoding on the other.

        They share the machine's caches and memory then as they do when they serve.
        """
        full = QUICK if self.quick else FULL
        if self.case.mixed:
            facts, samples = await self._measure(stage.connect(stage.engines["mixed"][0]), full)
        else:
            (facts, samples), (_, others) = await asyncio.gather(
                self._measure(
                    stage.connect(stage.engines["prefill"][0]), replace(full, batches=())
                ),
                self._measure(
                    stage.connect(stage.engines["decode"][0]),
                    replace(full, max_prompt_tokens=SHORT_PROMPTS),
                ),
            )
            samples |= {what: of for what, of in others.items() if isinstance(what, DecodeCase)}
        return build_profile(
            samples,
            replace(facts, source="tiny-llama"),
            device="CPU",
            measured_at=datetime.now(UTC).date().isoformat(),
            software={facts.engine: facts.version},
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        )

    async def _measure(
        self, client: OpenAIClient, settings: ProfilingSettings
    ) -> tuple[EngineInfo, SamplesByCase]:
        facts = await inspect_engine(client, self.model)
        named = replace(client, model=self.model)
        samples, left_out = await measure(named, facts, settings, _say)
        for line in left_out:
            print(f"left out: {line}", file=sys.stderr)
        for line in list_scattered(samples, settings.max_spread):
            print(f"scatters: {line}", file=sys.stderr)
        return facts, samples


def _model() -> Path:
    path = Path(gettempdir()) / f"cleave-fidelity-{SHAPE.layers}x{SHAPE.hidden}"
    if not path.exists():
        tiny_model.build(path, SHAPE)
    return path


async def _warm(clients: Sequence[OpenAIClient]) -> None:
    """A pass of every length: oneDNN compiles its kernels for each anew, some 4 ms."""

    async def warm(client: OpenAIClient) -> None:
        rng = random.Random(0)
        for tokens in range(1, WARM_TOKENS):
            await client.complete(draw_prompt(rng, tokens), 1)

    await asyncio.gather(*map(warm, clients))


def _say(done: int, total: int, what: str) -> None:
    if total and done % 25 == 0:
        print(f"profile: {done} of {total}, {what}", file=sys.stderr)
