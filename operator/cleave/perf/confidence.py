"""Source and error of a latency model, reported with every prediction."""

from dataclasses import dataclass
from enum import StrEnum


class LatencySource(StrEnum):
    """Kind of the source of iteration times."""

    MEASURED = "measured"
    """A measured profile of this model on this device."""
    FITTED = "fitted"
    """Published coefficients for this model, device and parallelism."""
    ROOFLINE = "roofline"
    """Computed from FLOPs and bytes with efficiencies calibrated on other models."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """The source of iteration times and its error."""

    kind: LatencySource
    source: str
    """Short description of the profile, fit or calibration."""
    error: float | None
    """Mean absolute percentage error against measurements, 0.05 for 5 %; None: not known."""
