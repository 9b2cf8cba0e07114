"""Kubernetes quantities (`500m`, `6Gi`) as numbers, and bytes as text for people.

Used wherever pods' resource requests are compared with what the machine has.
"""

import re

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
_SCALE = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def cpus(quantity: str | float) -> float:
    """Cores. Raises ValueError when `quantity` is none."""
    return _number(quantity)


def memory_bytes(quantity: str | float) -> int:
    """Bytes. Raises ValueError when `quantity` is none."""
    return int(_number(quantity))


def gib(size_bytes: int) -> str:
    """`size_bytes` as people read it: `1.5 GiB`."""
    return f"{size_bytes / 2**30:.1f} GiB"


def _number(quantity: str | float) -> float:
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None or match[2] not in _SCALE:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _SCALE[match[2]]
