"""Senders whose requests have ended engines: each gets one engine at a time. No I/O.

Used by the proxied requests of a gateway process. `suspect_requests` refuses a request that has
ended two engines, but one changed field makes another request of it. So for some minutes all
requests of its sender run as a whole on the instance that its next one got, and get an error while
that is away: they end one engine at a time, however they differ, and the others serve others.
"""

from collections import OrderedDict

from cleave.router.registry import InstanceRegistry

CONFINED_S = 300.0
"""How long after the last engine that it ended a sender gets one engine at a time."""
MAX_REMEMBERED = 1_024
_MAX_ADDRESS_BYTES = 64


def get_sender(tenant: str, address: str, forwarded_for: bytes | None) -> str:
    """The sender of a request: its tenant or, without tenants, the client's address and the last
    entry of X-Forwarded-For. A proxy adds that; a client may invent it, so only keys identify."""
    if tenant:
        return tenant
    if forwarded_for is None:
        return address
    last = forwarded_for.rpartition(b",")[2].strip()[:_MAX_ADDRESS_BYTES]
    return f"{address} {last.decode('latin-1')}"


class SuspectSenders:
    """Remembers suspects. Their number is bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._expiries: OrderedDict[str, float] = OrderedDict()
        """By sender: when it is forgotten. Oldest first."""
        self._instances: dict[tuple[str, str], str] = {}
        """By sender and base model: the instance that runs its requests, once one was picked."""

    def __bool__(self) -> bool:
        """Whether there are any; mostly not."""
        return bool(self._expiries)

    def __contains__(self, sender: str) -> bool:
        return sender in self._expiries

    def add(self, sender: str, now: float) -> None:
        """Confine this sender from now on. One that is confined already keeps its instance."""
        self._expiries[sender] = now + CONFINED_S
        self._expiries.move_to_end(sender)
        if len(self._expiries) > MAX_REMEMBERED:
            self._forget_oldest()

    def list_closed(self, sender: str, model: str, registry: InstanceRegistry) -> list[str]:
        """The instances, or ranks of them, that a request of this sender must not use."""
        own, instances = (
            self._instances.get((sender, _get_base(model, registry))),
            registry.instances,
        )
        others = [name for name, instance in instances.items() if instance.whole != own]
        # An instance that has left the fleet is replaced.
        return others if len(others) < len(instances) else []

    def record_pick(
        self, sender: str, model: str, instance: str, registry: InstanceRegistry
    ) -> None:
        """A request of this sender runs on this instance: so do those that follow."""
        if sender in self._expiries:
            whole = registry.instances[instance].whole
            self._instances[sender, _get_base(model, registry)] = whole

    def expire(self, now: float) -> None:
        """Forget old entries; called by the sweeper."""
        while self._expiries and next(iter(self._expiries.values())) <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        sender, _ = self._expiries.popitem(last=False)
        self._instances = {key: own for key, own in self._instances.items() if key[0] != sender}


def _get_base(model: str, registry: InstanceRegistry) -> str:
    """Adapters run on the engines of their base model."""
    served = registry.models.get(model)
    return served.base or model if served is not None else model
