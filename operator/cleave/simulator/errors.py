"""The error that the simulator raises."""


class SimulationError(ValueError):
    """The fleet or the trace cannot be simulated; the message is one line for the user."""
