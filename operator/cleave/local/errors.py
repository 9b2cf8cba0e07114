"""What can go wrong on one machine, in words for the person in front of it.

Raised by this package, reported by the command line. Imports nothing, so that the command line
can name them before anything heavy is loaded.
"""

from collections.abc import Sequence


class StateError(RuntimeError):
    """What runs already, or does not, forbids what is asked; one line that says why."""


class UpError(RuntimeError):
    """The deployment cannot or did not come up."""

    def __init__(self, faults: Sequence[str], log: Sequence[str] = ()) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
        self.log = log
        """Last lines of the log of the pod to blame."""


class ChatError(RuntimeError):
    """The demo's question was not answered; one line that says why."""
