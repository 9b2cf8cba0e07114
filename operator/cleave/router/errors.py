"""Errors of the router when it cannot select instances for a request.

The gateway and the gRPC service translate them to status codes.
"""


class RouterError(Exception):
    """No instance can be selected for a request."""


class UnknownModel(RouterError):  # noqa: N818 - names the condition, as callers say it
    """No instance serves this model."""

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model!r} does not exist")
        self.model = model


class NoInstance(RouterError):  # noqa: N818
    """No instance is available for the request now; the message is one sentence."""


class QueueFull(RouterError):  # noqa: N818
    """The limit of waiting requests is reached."""
