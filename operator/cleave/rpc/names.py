"""Words for the numbers of enums in messages. Used wherever an instance is shown to people.

Enums of proto3 are open: an agent of a newer version may state a role or a state that this version
has no name for, and every reader has to go on.
"""

from typing import Protocol, TypeVar

Number = TypeVar("Number", bound=int, contravariant=True)


class Enum(Protocol[Number]):
    """An enum as protobuf generates it."""

    def Name(self, number: Number) -> str:  # noqa: N802
        """Raises ValueError for numbers that are not in it."""


def name_of(enum: Enum[Number], number: Number) -> str:
    """`ROLE_PREFILL` -> `prefill`; a number that this version does not know -> `unknown_9`."""
    try:
        return enum.Name(number).partition("_")[2].lower()
    except ValueError:
        return f"unknown_{number}"
