"""Prompt lengths of a plan by which gateways treat requests, as labels of the workers' Service.

Written by `cleave.manifests`, read by gateways from the EndpointSlices that they watch anyway:
Kubernetes' controller gives each slice the labels of its Service. So a changed threshold starts no
pod again, all processes of all gateways get it, and it stays while the operator is away
(docs/decisions/predictions.md).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

SHORT_PROMPT, OVERLAP_MIN = "cleave.dev/short-prompt-tokens", "cleave.dev/overlap-min-tokens"
"""Labels; an absent one means 0, as gateways and operators of earlier versions have none."""
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class PlanThresholds:
    """Thresholds in prompt tokens; 0: the plan has none."""

    whole_below_tokens: int = 0
    """Decode instances may compute prompts of up to this length (`policy.short_prompts`)."""
    ahead_from_tokens: int = 0
    """KV of prompts from this length on is transferred while it is computed (Splitwise, IV-C)."""

    def to_labels(self) -> dict[str, str]:
        """The labels of the Service."""
        values = {SHORT_PROMPT: self.whole_below_tokens, OVERLAP_MIN: self.ahead_from_tokens}
        return {name: str(tokens) for name, tokens in values.items() if tokens}


def parse_thresholds(labels: Mapping[str, str]) -> PlanThresholds:
    """The thresholds among the labels of a slice; one that is no number counts as absent."""
    return PlanThresholds(_parse_tokens(labels, SHORT_PROMPT), _parse_tokens(labels, OVERLAP_MIN))


def _parse_tokens(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "0")
    if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
        return int(text)
    log.warning(
        "EndpointSlice: label %s: %r is not a number of tokens below a billion, and is ignored: "
        "remove it from the workers' Service; the operator writes the plan's",
        name,
        text,
    )
    return 0
