"""What can be wrong with a simulation that was asked for."""


class SimulationError(ValueError):
    """The fleet or the trace cannot be simulated; the message is one line for the user."""
