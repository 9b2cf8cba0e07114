"""Traffic with published statistics, by name: `--workload chat-1m`.

Vidur's three workloads (section 5, table 1), DistServe's three (section 6.1, figure 7) and Azure's
two production services (Splitwise, section III-A). Papers publish a mean and a few quantiles;
`assumed` describes the assumptions between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

import numpy as np

from cleave.traffic.workload import (
    Demand,
    DemandError,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
    Marginal,
    Quantiles,
)


@dataclass(frozen=True, slots=True)
class PublishedWorkload:
    """Lengths of one data set; arrivals are Poisson, as in the papers."""

    name: str
    source: str
    """Paper and table; for data sets repository, commit and licence."""
    published: str
    """Statistics that the source contains."""
    assumed: str
    """Assumptions about the rest."""
    prompt_tokens: Marginal
    output_tokens: Marginal
    max_model_len: int | None
    """Limit on prompt and output together in the data set."""
    rate: float = 1.0
    """Rate of the source in req/s, or 1."""

    def build_demand(self, rate: float | None = None, burstiness: float = 1.0) -> Demand:
        """Its requests, at its own rate unless `rate` is given."""
        lengths = IndependentLengths(self.prompt_tokens, self.output_tokens)
        arrivals_per_s = self.rate if rate is None else rate
        return Demand(arrivals_per_s, GeneratedRequests(lengths, burstiness), self.max_model_len)


def get_workload(name: str) -> PublishedWorkload:
    """The workload of that name. Raises DemandError, which lists all names."""
    normalized = name.strip().lower().replace("_", "-")
    for workload in WORKLOADS:
        if workload.name == normalized:
            return workload
    near = get_close_matches(normalized, list_names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(list_names())}"
    raise DemandError(f"no published workload {name!r}{hint}")


def list_names() -> tuple[str, ...]:
    """All names that `get_workload` accepts."""
    return tuple(workload.name for workload in WORKLOADS)


def _build_geometric(smallest: float, median: float, p90: float, largest: float) -> Quantiles:
    """Equal ratios between the four quantiles: skewed to the right, as lengths are."""
    quantile_levels = (0.0, 0.5, 0.9, 1.0)
    levels = np.unique(np.concatenate([np.linspace(a, b, 9) for a, b in pairwise(quantile_levels)]))
    logs = np.interp(levels, quantile_levels, np.log([smallest, median, p90, largest]))
    return Quantiles(tuple(levels.tolist()), tuple(np.exp(logs).tolist()))


_VIDUR_ASSUMED = (
    "equal ratios between the quantiles; least and largest length chosen to match the mean; prompt "
    "and output independent"
)
_DISTSERVE_PUBLISHED = (
    "mean lengths, read from the figure (the text does not give them); OPT's 2,048 positions"
)
_DISTSERVE_ASSUMED = (
    "log-normal lengths with the 90th percentile at {} means of the prompt and {} of the output; "
    "prompt and output independent; not compared with the data set"
)
_AZURE = (
    "Azure LLM inference trace 2023, {}: Azure/AzurePublicDataset@b469a11 (CC-BY-4.0), described "
    "in Splitwise (ISCA 2024), section III-A"
)


def _build_vidur(
    name: str, prompt: Quantiles, output: Quantiles, more: str = ""
) -> PublishedWorkload:
    return PublishedWorkload(
        name,
        "Vidur (MLSys 2024), table 1",
        "mean, median and 90th percentile of both lengths; at most 4,096 tokens together",
        _VIDUR_ASSUMED + more,
        prompt,
        output,
        4096,
    )


def _build_distserve(
    name: str, prompt: float, prompt_ratio: float, output: float, output_ratio: float
) -> PublishedWorkload:
    """Mean lengths, and the ratios of their 90th percentiles to them."""
    return PublishedWorkload(
        name,
        "DistServe (OSDI 2024), section 6.1 and figure 7",
        _DISTSERVE_PUBLISHED,
        _DISTSERVE_ASSUMED.format(prompt_ratio, output_ratio),
        LogNormal.from_mean_and_p90(prompt, prompt_ratio * prompt),
        LogNormal.from_mean_and_p90(output, output_ratio * output),
        2048,
    )


def _build_azure(
    name: str, data_set: str, rate: float, prompts: Sequence[float], outputs: Sequence[float]
) -> PublishedWorkload:
    """Quantiles of the lengths at 0, 1/32, ... 31/32 and five more in the tail."""
    levels = (*(i / 32 for i in range(32)), 0.98, 0.99, 0.995, 0.999, 1.0)
    return PublishedWorkload(
        name,
        _AZURE.format(data_set),
        "quantiles of both lengths, and the rate, of one hour in November 2023",
        "linear between the quantiles; prompt and output independent; Poisson arrivals",
        Quantiles(levels, tuple(prompts)),
        Quantiles(levels, tuple(outputs)),
        None,
        rate,
    )


WORKLOADS = (
    _build_vidur(
        "chat-1m", _build_geometric(14, 417, 1678, 3920), _build_geometric(4, 139, 484, 912)
    ),
    _build_vidur(
        "arxiv-4k",
        _build_geometric(1200, 2730, 3702, 3915),
        _build_geometric(125, 167, 372, 4096),
        "; the cut leaves a mean output of 275 where the paper has 291",
    ),
    _build_vidur(
        "bwb-4k", _build_geometric(580, 1037, 1453, 2200), _build_geometric(975, 1601, 2149, 2600)
    ),
    # Above the published means, which are those of requests cut to 2,048 tokens.
    _build_distserve("sharegpt", 808, 2.0, 220, 2.0),
    _build_distserve("humaneval", 171.3, 1.6, 98.2, 1.8),
    _build_distserve("longbench", 1740, 1.1, 94.8, 1.6),
    _build_azure(
        "azure-code",
        "code (8,819 requests)",
        2.566,
        (
            *(3, 51, 90, 137, 185, 246, 348, 462, 578, 700, 825, 915, 1016, 1093, 1196, 1342),
            *(1469, 1605, 1734, 1885, 2048, 2195, 2372, 2539, 2744, 2982, 3330, 3775, 4434),
            *(5510, 6499, 7435, 7436, 7436, 7436, 7437, 7437),
        ),
        (
            *(6, 6, 6, 7, 7, 8, 8, 9, 9, 9, 10, 10, 11, 11, 12, 12, 13, 14, 15, 15, 16, 18, 19),
            *(21, 24, 27, 31, 37, 46, 58, 77, 126, 171, 251, 359, 825, 1899),
        ),
    ),
    _build_azure(
        "azure-conversation",
        "conversation (19,366 requests)",
        5.53,
        (
            *(2, 165, 194, 206, 235, 374, 383, 391, 396, 401, 405, 412, 428, 818, 966, 1001),
            *(1020, 1037, 1052, 1067, 1083, 1100, 1120, 1147, 1189, 1312, 1335, 1767, 2309),
            *(3018, 4079, 4089, 4098, 4142, 4831, 6179, 14050),
        ),
        (
            *(7, 33, 45, 53, 60, 68, 75, 81, 85, 89, 92, 95, 99, 104, 110, 118, 129, 141, 157),
            *(171, 195, 223, 377, 389, 395, 397, 402, 411, 416, 427, 440, 502, 540, 601, 643),
            *(954, 1000),
        ),
    ),
)
