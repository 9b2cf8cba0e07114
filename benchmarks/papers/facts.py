"""What the papers report, to print beside our figures. Read by the other modules of this folder."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Application:
    """A row of DistServe's Table 1 (arXiv 2401.09670) and what section 6.2 says of it."""

    name: str
    model: str
    """Name in the latency fits; OPT-175B has none."""
    dataset: str
    """Name of the published workload."""
    ttft_ms: float
    tpot_ms: float
    vllm_tp: int
    """Parallelism of the paper's baseline (section 6.1)."""
    gain: str
    """DistServe's rate per GPU over vLLM's at 90 % attainment; for ShareGPT only a range is given
    over the three models."""


# The authors' own plots (LLMServe/DistServe at 82831f1, evaluation/2-benchmark-serving/plot.ipynb)
# have other targets for two rows; these follow the table's.
APPLICATIONS = (
    Application("Chatbot OPT-13B", "opt-13b", "sharegpt", 200, 100, 1, "2.0-3.41"),
    Application("Chatbot OPT-13B", "opt-13b", "sharegpt", 250, 100, 1, "2.0-3.41"),
    Application("Chatbot OPT-66B", "opt-66b", "sharegpt", 400, 100, 4, "2.0-3.41"),
    Application("Chatbot OPT-66B", "opt-66b", "sharegpt", 2500, 150, 4, "2.0-3.41"),
    Application("Chatbot OPT-175B", "opt-175b", "sharegpt", 4000, 200, 8, "2.0-3.41"),
    Application("Code completion OPT-66B", "opt-66b", "humaneval", 125, 200, 4, "3.2"),
    Application("Summarization OPT-66B", "opt-66b", "longbench", 15000, 150, 4, "4.48"),
)

Parallel = tuple[int, int]
"""Tensor and pipeline parallel size."""

PLACEMENTS: dict[tuple[str, str], tuple[Parallel, Parallel]] = {
    ("opt-13b", "sharegpt"): ((2, 1), (1, 1)),
    ("opt-66b", "sharegpt"): ((4, 1), (2, 2)),
    ("opt-66b", "longbench"): ((4, 1), (2, 2)),
    ("opt-66b", "humaneval"): ((4, 1), (2, 2)),
    ("opt-175b", "sharegpt"): ((3, 3), (4, 3)),
}
"""DistServe, Table 5: (model, dataset) -> parallelism of prefill and of decode."""


@dataclass(frozen=True, slots=True)
class Attainments:
    """A row of DistServe's Table 2, in percent: OPT-13B on ShareGPT."""

    rate: float
    """Of the whole system or per GPU: the table does not say."""
    vllm_real: float
    vllm_simulated: float
    distserve_real: float
    distserve_simulated: float


ATTAINMENTS = (
    Attainments(1.0, 97.0, 96.8, 100.0, 100.0),
    Attainments(1.5, 65.5, 65.1, 100.0, 100.0),
    Attainments(2.0, 52.8, 51.0, 99.3, 99.3),
    Attainments(2.5, 44.9, 46.1, 87.3, 88.3),
    Attainments(3.0, 36.7, 38.3, 83.0, 84.1),
    Attainments(3.5, 27.8, 28.0, 77.3, 77.0),
    Attainments(4.0, 23.6, 24.1, 70.0, 68.9),
)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What Vidur (MLSys'24, section 7.3, figures 1a and 5a) found best for LLaMA2-70B."""

    workload: str
    gpu: str | None
    """None: the text does not say."""
    batch_size: int | None
    rest: str


WHAT_IFS = (
    WhatIf("chat-1m", "H100", 256, "TP2 PP2, Sarathi-Serve, chunks of 512"),
    WhatIf("bwb-4k", "A100", 64, ""),
    WhatIf("arxiv-4k", None, None, ""),
)

MISCONFIGURATION = 2.0
"""Vidur, section 7.3: cost of serving Chat-1M with Arxiv-4K's best configuration."""


@dataclass(frozen=True, slots=True)
class ClassGains:
    """TetriInfer over vLLM for one class of requests (section 5.1, figures 11 to 15), less 1; None:
    the text gives no number."""

    ttft: float | None
    jct: float
    used: float
    """Time that instances were in use."""


CLASS_GAINS = {
    "LPLD": ClassGains(-0.44, -0.40, 0.0),
    "LPHD": ClassGains(-0.97, -0.47, -0.38),
    "HPLD": ClassGains(-0.09, -0.23, 0.43),
    "HPHD": ClassGains(None, -0.19, 0.07),
    "Mixed": ClassGains(-0.85, -0.50, -0.21),
}


Machines = tuple[int, int]
"""Prompt and token machines of eight GPUs each."""


@dataclass(frozen=True, slots=True)
class Design:
    """A cluster with the power of 40 DGX-H100 (Splitwise, ISCA'24, section VI-B and figure 16).

    Counts that the text leaves out are those of the authors' own runs: Mutinifni/splitwise-sim at
    8f99e7d (MIT), scripts/run_throughput_isopower.sh and notebooks/plots.ipynb.
    """

    name: str
    prompt: str
    """Kind of GPU, as the performance model names it."""
    token: str
    code: Machines
    conversation: Machines


DESIGNS = (
    Design("AA", "a100-80gb", "a100-80gb", (55, 15), (45, 25)),
    Design("HH", "h100-80gb", "h100-80gb", (35, 5), (25, 15)),
    Design("HA", "h100-80gb", "a100-80gb", (35, 8), (25, 26)),
    Design("HHcap", "h100-80gb", "h100-80gb-pcap", (35, 7), (25, 21)),
)

THROUGHPUTS: dict[tuple[str, str], float] = {("AA", "A100"): 2.15, ("HA", "A100"): 1.18}
"""Conversation, equal power: a design's throughput over a baseline's (section VI-B, figure 18a)."""

CLUSTERS: dict[tuple[str, str], str] = {
    ("equal cost", "AA"): "1.4x req/s, 1.25x power, 2x machines",
    ("equal throughput, least power", "HHcap"): "0.75x power, 1x cost, 1x machines",
    ("equal throughput, least cost", "AA"): "0.75x cost",
}
"""Conversation: what the text says over Baseline-H100 (section VI-C, figures 18b, 19a, 19b)."""
