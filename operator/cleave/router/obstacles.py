"""Why a request cannot be placed, in words. Called by the router."""

from collections.abc import Collection

from cleave.router.directory import Model
from cleave.router.instance import Contact
from cleave.rpc.names import name_of
from cleave.rpc.v1 import agent_pb2


def explain(model: str, known: Model, single: bool, avoid: Collection[str]) -> str:
    """One sentence that says which instances there are and why none of them will do."""
    parts: list[str] = []
    for instance in known.instances:
        stated = instance.registration
        state = name_of(agent_pb2.State, stated.state)
        if instance.contact in (Contact.SILENT, Contact.LOST):
            state = instance.contact.value
        elif instance.name in avoid:
            state = "failed this request"
        elif instance.selectable and not stated.kv_path.verified:
            state = "KV path not verified"
        role = name_of(agent_pb2.Role, stated.role)
        parts.append(f"{instance.name} ({role}): {state}")
    kind = "a whole request" if single else "a request"
    listed = "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")
    return f"no instance of {model!r} can take {kind} now: {listed}"
