"""Senders whose requests have ended engines: each gets one engine at a time. No I/O.

Used by the proxied requests of a gateway process. `suspect_requests` refuses a request that has
ended two engines, but one changed field makes another request of it, and a client may leave before
its engine ends. So the starts of all requests are counted by sender, and the engines that ended
before they had answered one. A sender with two of those, in a quarter of its starts, is a suspect:
for some minutes its requests run as a whole on the instance that its next one got, and get an error
while that is away because of them. So they end one engine at a time, and others serve others.

What is hard: engines end for other reasons, too. A sender with many requests has some on every
engine that ends, but most of its requests were answered.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from cleave.gateway.http.connection_limiter import get_address_group
from cleave.gateway.upstream.suspect_requests import RECENT_S
from cleave.router.instance import Target
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick
from cleave.rpc.v1 import agent_pb2

CONFINED_S = 300.0
"""How long after the last engine that it ended a sender gets one engine at a time."""
WINDOW_S = 300.0
"""Starts and ended engines are counted for so long."""
MIN_ENDED_ENGINES = 2
MAX_STARTS_PER_ENDED_ENGINE = 4
MAX_UNANSWERED = 64
CHECK_INTERVAL_S = 0.1
"""Of senders that are no suspects; it bounds the cost of those with many requests."""
MAX_REMEMBERED = 1_024
"""Suspects, and senders whose starts are counted."""
_MAX_ADDRESS_BYTES = 64


def get_sender(tenant: str, address: str, forwarded_for: bytes | None) -> str:
    """The sender of a request: its tenant or, without tenants, the client's address and the last
    entry of the last X-Forwarded-For. The nearest proxy adds that, and a client can only choose
    those before it; one that no proxy is before may invent it, so only keys identify."""
    if tenant:
        return tenant
    if forwarded_for is None:
        return address
    last = forwarded_for.rpartition(b",")[2].strip()[:_MAX_ADDRESS_BYTES]
    return f"{address} {_group_forwarded(last.decode('latin-1'))}"


def _group_forwarded(entry: str) -> str:
    """The address under which an entry counts; some proxies add the port."""
    host = entry[1:].partition("]")[0] if entry.startswith("[") else entry
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return get_address_group((host, 0))
    except (OSError, ValueError):
        return host


@dataclass(slots=True)
class _Starts:
    """What a sender has started."""

    since: float
    """The window's begin."""
    count: int = 0
    num_ended: int = 0
    """Engines that ended before they had answered a request that had just come."""
    checked_at: float = 0.0
    unanswered: dict[int, tuple[float, tuple[Target, ...]]] = field(default_factory=dict)
    """When the latest requests were sent, and where, by the pick's id. Also of clients that have
    left, which free the pick: another one may get its id and then replaces it here."""


class SuspectSenders:
    """Remembers suspects. Their number is bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._starts: OrderedDict[str, _Starts] = OrderedDict()
        """By sender; the one that has started nothing for longest is first."""
        self._expiries: OrderedDict[str, float] = OrderedDict()
        """By sender: when it is forgotten. Oldest first."""
        self._instances: dict[tuple[str, str], str] = {}
        """By sender and base model: the instance that runs its requests, once one was picked."""
        self._ended: set[tuple[str, str]] = set()
        """Senders, and their instances that ended because of them."""

    def __contains__(self, sender: str) -> bool:
        return sender in self._expiries

    def record_start(
        self, sender: str, model: str, pick: Pick, registry: InstanceRegistry, now: float
    ) -> None:
        """A request is sent to these instances. Those that follow of a suspect go there, too."""
        starts = self._starts.get(sender)
        if starts is None:
            starts = self._starts[sender] = _Starts(now)
            if len(self._starts) > MAX_REMEMBERED:
                self._starts.popitem(last=False)
        else:
            self._starts.move_to_end(sender)
        starts.count += 1
        targets = (pick.decode,) if pick.prefill is None else (pick.prefill, pick.decode)
        starts.unanswered[id(pick)] = now, targets
        if len(starts.unanswered) > MAX_UNANSWERED:
            del starts.unanswered[next(iter(starts.unanswered))]
        if sender in self._expiries:
            whole = registry.instances[pick.decode.instance].whole
            self._instances[sender, _get_base(model, registry)] = whole
            self._ended.discard((sender, whole))

    def record_answer(self, sender: str, pick: Pick) -> None:
        """The first bytes of an answer have come from there."""
        starts = self._starts.get(sender)
        if starts is not None:
            starts.unanswered.pop(id(pick), None)

    def check(self, sender: str, registry: InstanceRegistry, now: float) -> bool:
        """Whether this sender is a suspect, by what agents have reported until now."""
        starts = self._starts.get(sender)
        if starts is None:
            return sender in self._expiries
        self._count_ended(sender, starts, registry, now)
        num_ended = starts.num_ended
        if (
            num_ended >= MIN_ENDED_ENGINES
            and num_ended * MAX_STARTS_PER_ENDED_ENGINE >= starts.count
        ):
            self.add(sender, now)
        return sender in self._expiries

    def is_suspect(self, sender: str, registry: InstanceRegistry, now: float) -> bool:
        """The same, but a sender without a case is not checked for every request."""
        if sender in self._expiries:
            return self.check(sender, registry, now)
        starts = self._starts.get(sender)
        if starts is None or now - starts.checked_at < CHECK_INTERVAL_S:
            return False
        starts.checked_at = now
        return self.check(sender, registry, now)

    def _count_ended(
        self, sender: str, starts: _Starts, registry: InstanceRegistry, now: float
    ) -> None:
        if now - starts.since > WINDOW_S:
            starts.since, starts.count, starts.num_ended = now, len(starts.unanswered), 0
        ended: set[str] = set()
        for key, (sent_at, targets) in tuple(starts.unanswered.items()):
            gone = [
                registry.instances[target.instance].whole
                for target in targets
                if _has_ended(target, registry)
            ]
            if gone or now - sent_at > RECENT_S:
                del starts.unanswered[key]
            if now - sent_at <= RECENT_S + CHECK_INTERVAL_S:
                ended.update(gone)
        # Ranks of one instance, and requests on one engine, end together.
        starts.num_ended += len(ended)
        self._ended.update((sender, whole) for whole in ended)

    def add(self, sender: str, now: float) -> None:
        """Confine this sender from now on. One that is confined already keeps its instance."""
        self._expiries[sender] = now + CONFINED_S
        self._expiries.move_to_end(sender)
        if len(self._expiries) > MAX_REMEMBERED:
            self._forget_oldest()

    def list_closed(self, sender: str, model: str, registry: InstanceRegistry) -> list[str]:
        """The instances, or ranks of them, that a request of this suspect must not use."""
        own = self._instances.get((sender, _get_base(model, registry)))
        instances = registry.instances
        ranks = [instance for instance in instances.values() if instance.whole == own]
        is_because_of_it = (sender, own) in self._ended
        if not ranks or not (is_because_of_it or any(rank.selectable for rank in ranks)):
            # One that has left the fleet, or is away for another reason, is replaced.
            return []
        return [name for name, instance in instances.items() if instance.whole != own]

    def expire(self, now: float) -> None:
        """Forget old entries; called by the sweeper."""
        while self._expiries and next(iter(self._expiries.values())) <= now:
            self._forget_oldest()
        while self._starts:
            sender, starts = next(iter(self._starts.items()))
            latest = max((sent_at for sent_at, _ in starts.unanswered.values()), default=0.0)
            if now - max(starts.since, latest) <= WINDOW_S:
                break
            del self._starts[sender]

    def _forget_oldest(self) -> None:
        sender, _ = self._expiries.popitem(last=False)
        self._instances = {key: own for key, own in self._instances.items() if key[0] != sender}
        self._ended = {key for key in self._ended if key[0] != sender}


def _has_ended(target: Target, registry: InstanceRegistry) -> bool:
    """Whether the agent has reported that this boot's process is gone."""
    instance = registry.instances.get(target.instance)
    if instance is None:
        return False
    registration = instance.registration
    is_same_boot = registration.boot_id == target.boot_id
    return not is_same_boot or registration.state == agent_pb2.STATE_STARTING


def _get_base(model: str, registry: InstanceRegistry) -> str:
    """Adapters run on the engines of their base model."""
    served = registry.models.get(model)
    return served.base or model if served is not None else model
