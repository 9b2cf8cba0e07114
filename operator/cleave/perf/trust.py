"""How far a latency model can be trusted, said with every prediction."""

from dataclasses import dataclass
from enum import StrEnum


class Basis(StrEnum):
    """Where the times come from."""

    MEASURED = "measured"
    """A profile of this model on this device."""
    FITTED = "fitted"
    """Published coefficients for this model, device and parallelism."""
    ROOFLINE = "roofline"
    """Computed from FLOPs and bytes with efficiencies calibrated on other models."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Where times come from and how wrong they have been."""

    basis: Basis
    source: str
    """The profile, fit or calibration, in a few words."""
    error: float | None
    """Mean absolute percentage error against measurements, 0.05 for 5 %; None: not known."""
