"""Real vLLM on CPU with a tiny random model, and its twin made from a profile measured here."""

import asyncio
import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from cores import part_fronts
from idle import find_dispatch, fit_transfer, measure_idle, read_idle
from stage import Case, Stage
from subject import make_fleet

from cleave.local import tiny_model
from cleave.perf import latency
from cleave.perf import profile as profiles
from cleave.perf.profile import MeasuredProfile
from cleave.profiling.client import Client
from cleave.profiling.engine import inspect
from cleave.profiling.points import find_scattered, to_profile
from cleave.profiling.rounds import Settings, measure
from cleave.profiling.shots import draw
from cleave.simulator.fleet import Engine, Fleet, Transfer

CASES = (Case(mixed=1), Case(prefill=1, decode=1))
"""The profile is measured on the first."""
SHAPE = tiny_model.Shape(layers=4, hidden=512, heads=8, kv_heads=4, mlp=1024)
"""Passes of some 5 to 100 ms, as real models have them on GPUs. With the smallest model fronts have
thousands of tokens a second to send, and are what limits the fleet; with larger ones the kernels of
two engines do not fit 24 GB."""
BLOCK_SIZE = 128
"""vLLM's on CPU."""
MAX_BATCHED_TOKENS = 4096
MAX_NUM_SEQS = 64
WARM_TOKENS = 1000
"""Hardly any of the scaled prompts is longer."""
KERNELS = 65536
"""Compiled kernels that oneDNN keeps; its 1,024 are too few for passes of all lengths."""
FULL = Settings(
    repeats=3,
    batches=(1, 2, 4, 8, 16, 32),
    contexts=(64, 256, 1024),
    longest_fill_s=5.0,
)
QUICK = Settings(repeats=3, batches=(1, 4, 16), contexts=(64, 512), steps_per_octave=1)


@dataclass(frozen=True, slots=True)
class Vllm:
    """One fleet of vLLM engines and its twin."""

    case: Case
    quick: bool
    kind: str = "vllm"
    model: str = "tiny"
    length_scale: float = 0.25
    max_model_len: int = 4096
    time_scale: float = 1.0

    def spec(self) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement."""
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
                    "--no-enable-prefix-caching",
                ],
                "env": [{"name": "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "value": str(KERNELS)}],
            },
        }

    def prepare(self, stage: Stage, folder: Path) -> None:
        """A profile of the mixed engine, and times of the idle fleet."""
        urls = [url for urls in stage.engines.values() for url in urls]
        part_fronts(urls, stage.url)
        asyncio.run(_warm(urls, self.model))
        file = _profile(folder)
        if self.case.mixed and not file.exists():
            profiles.write(asyncio.run(self._profile(stage.engines["mixed"][0])), file)
        measure_idle(stage, self.model, self.time_scale, folder / "idle.json")

    def twin(self, folder: Path) -> Fleet:
        """Engines as profiled; ways and pulls from an idle fleet."""
        profile = latency.load(str(_profile(folder)))
        engine = Engine(
            profile.timing,
            profile.kv_capacity_tokens,
            BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
        )
        idle = read_idle(folder / "idle.json")
        transfer = fit_transfer(idle) if self.case.decode else Transfer()
        return make_fleet(self.case, engine, transfer, find_dispatch(idle, self.case.ways))

    async def _profile(self, url: str) -> MeasuredProfile:
        settings = QUICK if self.quick else FULL
        client = Client(url)
        facts = await inspect(client, self.model)
        samples = await measure(replace(client, model=self.model), facts, settings, _say)
        for line in find_scattered(samples, settings.max_spread):
            print(f"scatters: {line}")
        return to_profile(
            samples,
            replace(facts, source="tiny-llama"),
            device="CPU",
            measured_at=datetime.now(UTC).date().isoformat(),
            software={facts.engine: facts.version},
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        )


def _model() -> Path:
    path = Path(gettempdir()) / f"cleave-fidelity-{SHAPE.layers}x{SHAPE.hidden}"
    if not path.exists():
        tiny_model.build(path, SHAPE)
    return path


async def _warm(urls: list[str], model: str) -> None:
    """A pass of every length: oneDNN compiles its kernels for each anew, some 4 ms."""

    async def warm(url: str) -> None:
        rng = random.Random(0)
        client = Client(url, model)
        for tokens in range(1, WARM_TOKENS):
            await client.complete(draw(rng, tokens), 1)

    await asyncio.gather(*map(warm, urls))


def _first(folder: Path) -> Path:
    """The folder of the case that the profile is measured on, beside `folder`."""
    return folder.with_name(CASES[0].name)


def _profile(folder: Path) -> Path:
    return _first(folder) / "profile.yaml"


def _say(done: int, total: int, what: str) -> None:
    if total and done % 25 == 0:
        print(f"profile: {done} of {total}, {what}", flush=True)
