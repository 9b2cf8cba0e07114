"""Why no instance of a model can take a request, for the error that its client gets. Called by the
router."""

from collections.abc import Collection

from cleave.router.instance import Connectivity
from cleave.router.registry import ServedModel
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2


def describe_unavailable(
    model: str, served: ServedModel, colocated: bool, excluded: Collection[str]
) -> str:
    """One sentence that lists the instances of a model and why each of them is unavailable."""
    parts: list[str] = []
    for instance in served.instances:
        registration = instance.registration
        state = get_enum_name(agent_pb2.State, registration.state)
        if instance.connectivity in (Connectivity.UNRESPONSIVE, Connectivity.DISCONNECTED):
            state = instance.connectivity.value
        elif instance.name in served.lacking:
            state = "has not loaded the adapter"
        elif instance.name in excluded:
            state = "failed this request"
        elif instance.selectable and not registration.kv_path.verified:
            state = "KV path not verified"
        role = get_enum_name(agent_pb2.Role, registration.role)
        parts.append(f"{instance.name} ({role}): {state}")
    subject = "a whole request" if colocated else "a request"
    details = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    closed = sum(table.closed_pairs.count for table in served.score_tables)
    if closed:
        details += f"; {closed} of their pairs failed canary handoffs"
    return f"no instance of {model!r} can take {subject} now: {details}"
