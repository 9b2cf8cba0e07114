"""The engines of the published runs: what their scripts and versions of vLLM say.

A run tells how wrong the planner's times are only if its engine is the one that the planner plans
for, vLLM 0.32 by its defaults. It is another one if, by script and version alone,

- it does not schedule asynchronously: before vLLM 0.14, without `--async-scheduling`;
- its products or experts use a backend that vLLM 0.32 does not select by itself for this model and
  GPU;
- it shares experts in another way than the published row says.

No error decides. The scripts are InferenceX's (github.com/SemiAnalysisAI/InferenceX, Apache-2.0,
read in its history up to 843c625): benchmarks/70b_*.sh and gptoss_*.sh of 2025, later
benchmarks/single_node. What vLLM 0.32 selects is in its `fused_moe/oracle` and `kernels/linear`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

H100, H200 = ("H100-SXM-80GB",), ("H200-SXM-141GB",)
HOPPER = H100 + H200
B200 = ("B200-SXM-180GB",)
FUSED_BY_DEFAULT = (0, 17)
"""Version of vLLM from which it fuses all-reduces with norms (pull request 34299 of February 2026).
"""
ASYNCHRONOUS_BY_DEFAULT = (0, 14)
DEFAULT_GRAPH_TOKENS = 512
"""Largest iteration that runs as a CUDA graph in the versions of these runs."""
NOT_ASYNCHRONOUS = "synchronous scheduling"


@dataclass(frozen=True)
class Engine:
    """How a run's engine differs from the defaults of vLLM."""

    kv_bytes: int = 2
    """Of a value in the KV cache."""
    fuses_reduces: bool = False
    graph_tokens: int = DEFAULT_GRAPH_TOKENS
    """Largest iteration with prompts that ran as a CUDA graph."""
    batched_tokens: int = 8192
    """Of the largest iteration."""
    batched_prompts: int = 0
    """The same as a number of prompts of the nominal length, if the script sets it so."""
    utilisation: float = 0.9
    """Share of the GPU's memory."""
    schedules_ahead: bool = True
    differs: str = ""
    """Why it is another engine than the planner's; empty: it is not."""

    @property
    def has_known_kernels(self) -> bool:
        """Whether it may differ by its scheduling alone."""
        return self.differs in ("", NOT_ASYNCHRONOUS)


@dataclass(frozen=True)
class Script:
    """What InferenceX ran from a day on."""

    model: str
    """As in the benchmark, or its beginning."""
    gpus: Sequence[str]
    since: str
    engine: Engine


_NO_CONFIG = Engine(schedules_ahead=False, differs=NOT_ASYNCHRONOUS)
"""The scripts of H100 passed their options as `--config=FILE` until 4 November 2025, and vLLM
0.10.2 reads the file only where it is an argument of its own (`FlexibleArgumentParser`)."""
_LLAMA_B200 = Engine(kv_bytes=1, fuses_reduces=True, graph_tokens=0)
"""`cudagraph_mode: FULL_DECODE_ONLY`."""
_GPT_OSS_B200 = Engine(
    fuses_reduces=True, graph_tokens=2048, differs="experts that compute in 8 bits"
)
"""VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8; vLLM 0.32 selects these experts with 16 bits."""
_MINIMAX_B200 = Engine(kv_bytes=1, graph_tokens=2048, batched_prompts=2)
SCRIPTS = (
    Script("llama-3.1-70b-fp8", H200, "2025-09", Engine(kv_bytes=1)),
    Script("llama-3.1-70b-fp8", H100, "2025-09", _NO_CONFIG),
    Script("llama-3.1-70b-fp8", B200, "2025-09", _LLAMA_B200),
    # vLLM 0.32 selects CuTe DSL's products, which the tables have.
    Script(
        *("llama-3.1-70b-fp4", B200, "2025-09"),
        replace(_LLAMA_B200, differs="CUTLASS's products of 4 bits"),
    ),
    Script("gpt-oss-120b", H200, "2025-09", Engine(graph_tokens=2048)),
    Script("gpt-oss-120b", H100, "2025-09", _NO_CONFIG),
    # VLLM_MXFP4_USE_MARLIN; vLLM 0.32 selects Triton's experts.
    Script(
        *("gpt-oss-120b", HOPPER, "2026-01-02"),
        Engine(graph_tokens=2048, differs="Marlin's experts"),
    ),
    Script("gpt-oss-120b", B200, "2025-09", _GPT_OSS_B200),
    Script("gpt-oss-120b", B200, "2025-12", replace(_GPT_OSS_B200, kv_bytes=1)),
    # vLLM 0.16 selects FlashInfer's where 0.32 selects Triton's (0.16.0, fused_moe/oracle/fp8.py).
    Script(
        *("minimax-m2.5", HOPPER, "2026-03-01"),
        Engine(utilisation=0.95, differs="FlashInfer's experts"),
    ),
    Script(
        *("minimax-m2.5", HOPPER, "2026-03-13"),
        Engine(utilisation=0.95, differs="expert parallelism"),
    ),
    Script(
        *("minimax-m2.5", B200, "2026-03-11"),
        Engine(utilisation=0.95, differs="expert parallelism, Triton's experts"),
    ),
    Script("minimax-m2.5", B200, "2026-04-03", _MINIMAX_B200),
)
"""By model and GPU, the oldest first."""
KV_OF_8_BITS = ("llama-3.1-8b-fp8",)
"""Checkpoints with scales of KV, for which vLLM chooses its type."""


def find_engine(model: str, gpu: str, date: str, version: str) -> Engine:
    """The engine of a run. `date`: of a measurement of InferenceX; empty: of somebody else, who
    named no options. `version`: of vLLM; empty: older than 0.14 with the option to schedule
    asynchronously, which InferenceX's scripts of 2025 have."""
    engine = Engine(kv_bytes=1) if model in KV_OF_8_BITS else Engine()
    for script in SCRIPTS:
        if model.startswith(script.model) and gpu in script.gpus and script.since <= date:
            engine = script.engine
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2])) if version[:1].isdigit() else None
    if numbers is not None and numbers >= FUSED_BY_DEFAULT:
        engine = replace(engine, fuses_reduces=True)
    is_old = numbers is not None and numbers < ASYNCHRONOUS_BY_DEFAULT
    if is_old and not date:
        return replace(engine, schedules_ahead=False, differs=NOT_ASYNCHRONOUS)
    return engine
