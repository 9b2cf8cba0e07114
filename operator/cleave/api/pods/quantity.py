"""Quantities of Kubernetes as numbers. Pure.

Called for resources of pods and nodes. The API server rewrites quantities: 1000 devices are `1k`.
"""

import math
import re

QUANTITY_PATTERN = r"^([0-9]+|[0-9]*\.[0-9]+|[0-9]+\.)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$"
"""Matches Kubernetes quantities that are not negative: "500m", "6Gi", 2."""
_SCALE = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3,
    "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def format_quantity(number: float) -> str:
    """Format a number as a quantity, with a binary suffix where it divides, else in thousandths."""
    for suffix in ("Gi", "Mi"):
        if number >= _SCALE[suffix] and number % _SCALE[suffix] == 0:
            return f"{number / _SCALE[suffix]:.0f}{suffix}"
    return f"{number:.0f}" if number == int(number) else f"{math.ceil(round(number * 1000, 6))}m"


def parse_quantity(quantity: str | float) -> float:
    """Parse a Kubernetes quantity (`500m` cores, `6Gi` bytes). Raises ValueError. `E` is a suffix
    (`1E`) or begins an exponent (`1E3`)."""
    match = re.fullmatch(QUANTITY_PATTERN, str(quantity))
    digits, suffix = (match[1], match[2] or "") if match else ("nan", "")
    number = float(digits) * _SCALE[suffix] if suffix in _SCALE else float(digits + suffix)
    if not math.isfinite(number):
        raise ValueError(f"{quantity!r} is not a quantity")
    return number
