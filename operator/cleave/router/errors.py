"""Errors of the router when it cannot select instances for a request.

The gateway and the gRPC service translate them to status codes.
"""

from collections.abc import Collection, Iterable

from cleave.router.instance import Connectivity, RoutedInstance
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2

_QUOTED_CHARACTERS = 256
"""Of a name, in an error message."""


class RouterError(Exception):
    """No instance can be selected for a request."""


class UnknownModel(RouterError):  # noqa: N818 - names the condition, as callers say it
    """No instance serves this model."""

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= _QUOTED_CHARACTERS else f"{model[:_QUOTED_CHARACTERS]}..."
        super().__init__(f"the model {shown!r} does not exist")
        self.model = model


class NoInstance(RouterError):  # noqa: N818
    """No instance is available for the request now; the message is one sentence."""


class QueueFull(RouterError):  # noqa: N818
    """The limit of waiting requests is reached."""


def describe_unavailable(
    model: str,
    instances: Iterable[RoutedInstance],
    *,
    colocated: bool,
    lacking: Collection[str],
    excluded: Collection[str],
    closed: int,
) -> str:
    """One sentence that lists the instances of a model and why each of them is unavailable.
    `lacking`: those that have not loaded the adapter; `excluded`: those that failed the request;
    `closed`: pairs that failed canary handoffs."""
    parts: list[str] = []
    for instance in instances:
        registration = instance.registration
        state = get_enum_name(agent_pb2.State, registration.state)
        if instance.connectivity in (Connectivity.UNRESPONSIVE, Connectivity.DISCONNECTED):
            state = instance.connectivity.value
        elif instance.name in lacking:
            state = "has not loaded the adapter"
        elif instance.name in excluded:
            state = "failed this request"
        elif instance.selectable and not registration.kv_path.verified:
            state = "KV path not verified"
        role = get_enum_name(agent_pb2.Role, registration.role)
        parts.append(f"{instance.name} ({role}): {state}")
    subject = "a whole request" if colocated else "a request"
    details = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    if closed:
        details += f"; {closed} of their pairs failed canary handoffs"
    return f"no instance of {model!r} can take {subject} now: {details}"
