"""Why no instance is available for a request, as a sentence. Called by the router."""

from collections.abc import Collection

from cleave.router.instance import Contact
from cleave.router.registry import Model
from cleave.rpc.enum_names import name_of
from cleave.rpc.v1 import agent_pb2


def explain(model: str, served: Model, single: bool, avoid: Collection[str]) -> str:
    """One sentence that lists the instances of a model and why each of them is unavailable."""
    parts: list[str] = []
    for instance in served.instances:
        registration = instance.registration
        state = name_of(agent_pb2.State, registration.state)
        if instance.contact in (Contact.SILENT, Contact.LOST):
            state = instance.contact.value
        elif instance.name in avoid:
            state = "failed this request"
        elif instance.selectable and not registration.kv_path.verified:
            state = "KV path not verified"
        role = name_of(agent_pb2.Role, registration.role)
        parts.append(f"{instance.name} ({role}): {state}")
    what = "a whole request" if single else "a request"
    listed = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    return f"no instance of {model!r} can take {what} now: {listed}"
