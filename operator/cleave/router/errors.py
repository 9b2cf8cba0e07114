"""Why a request cannot be placed. Raised by the router; the gateway and the RPC service translate.

Nothing here speaks HTTP or gRPC.
"""


class RouterError(Exception):
    """A request cannot be placed now."""


class UnknownModel(RouterError):  # noqa: N818 - names the condition, as callers say it
    """No instance of the fleet serves this model."""

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model!r} does not exist")
        self.model = model


class NoInstance(RouterError):  # noqa: N818
    """Nothing may take the request now, or has answered so far; the reason is one sentence."""


class QueueFull(RouterError):  # noqa: N818
    """As many requests wait as are allowed to."""
