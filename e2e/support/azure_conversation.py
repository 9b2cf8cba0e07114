"""Request lengths of Azure's conversation service.

Quantiles (0, 1/32, ... 1) of the 19,366 requests in AzureLLMInferenceTrace_conv.csv of
Azure/AzurePublicDataset (CC-BY-4.0; described in Splitwise, ISCA 2024). Means of the trace: 1,155
prompt and 211 output tokens; both lengths are almost uncorrelated (-0.11), so they are drawn apart.
"""

import random
from bisect import bisect_right

PROMPT_TOKENS = (
    *(2, 165, 194, 206, 235, 374, 383, 391, 396, 401, 405, 412, 428, 818, 966, 1001, 1020),
    *(1037, 1052, 1067, 1083, 1100, 1120, 1147, 1189, 1312, 1335, 1766, 2309, 3018, 4079, 4089),
    14050,
)
OUTPUT_TOKENS = (
    *(7, 33, 45, 53, 60, 68, 75, 81, 85, 89, 92, 95, 99, 104, 110, 118, 129, 141, 157, 171, 195),
    *(223, 377, 389, 395, 397, 402, 411, 416, 427, 440, 502, 1000),
)
_GRID = [i / 32 for i in range(33)]


def draw(quantiles: tuple[int, ...], rng: random.Random) -> int:
    """One length by inverse transform, linear between the quantiles."""
    u = rng.random()
    i = bisect_right(_GRID, u) - 1
    return round(quantiles[i] + (u - _GRID[i]) * 32 * (quantiles[i + 1] - quantiles[i]))
