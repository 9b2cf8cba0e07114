"""Source and error of a latency model, reported with every prediction."""

from dataclasses import dataclass
from enum import StrEnum


class Basis(StrEnum):
    """Kind of source of iteration times."""

    MEASURED = "measured"
    """A measured profile of this model on this device."""
    FITTED = "fitted"
    """Published coefficients for this model, device and parallelism."""
    ROOFLINE = "roofline"
    """Computed from FLOPs and bytes with efficiencies calibrated on other models."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The source of iteration times and its error."""

    basis: Basis
    source: str
    """Short description of the profile, fit or calibration."""
    error: float | None
    """Mean absolute percentage error against measurements, 0.05 for 5 %; None: not known."""
