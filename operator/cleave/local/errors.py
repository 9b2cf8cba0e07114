"""Errors of this package, with messages for users.

Reported by the command line. The module imports nothing, so that the command line can handle these
errors before it loads anything slow.
"""

from collections.abc import Sequence


class StateError(RuntimeError):
    """The deployment's current state makes the operation impossible; one line with the reason."""


class DeploymentStartError(RuntimeError):
    """The deployment cannot start or has failed to start."""

    def __init__(self, faults: Sequence[str], log: Sequence[str] = ()) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
        self.log_tail = log
        """Last log lines of the pod that failed."""


class ChatError(RuntimeError):
    """The demo's chat request failed; one line with the reason."""
