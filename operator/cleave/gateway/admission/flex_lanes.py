"""Requests of the tier flex that wait for idle capacity or run, by model.

Used by the admission controller. `flex_capacity` decides; this module measures what is idle and
keeps the queues. A request of another tier never waits for one of these.
"""

import math

from cleave.gateway.admission.flex_capacity import FlexWindow, has_idle_capacity, has_seats
from cleave.gateway.admission.ticket import AdmissionTicket, TicketQueue, Waiter
from cleave.gateway.event_loop_faults import contain
from cleave.router.instance import RoutedInstance
from cleave.router.registry import InstanceRegistry
from cleave.rpc.v1.agent_pb2 import ROLE_PREFILL


class _Lane:
    """Of one model."""

    __slots__ = ("queue", "window")

    def __init__(self) -> None:
        self.queue: TicketQueue = TicketQueue()
        self.window = FlexWindow()


class FlexLanes:
    """The requests of the tier flex of one gateway process."""

    def __init__(self, registry: InstanceRegistry, max_wait_s: float, tpot_target_s: float) -> None:
        """`max_wait_s`: for idle capacity. `tpot_target_s`: of other streams; 0: none."""
        self.is_active = False
        """Whether any request waits or runs: then `observe_stream` must be called."""
        self._registry = registry
        self._max_wait_s = max_wait_s
        self._tpot_target_s = tpot_target_s
        self._lanes: dict[str, _Lane] = {}

    def get_queue(self, model: str) -> TicketQueue:
        """The waiting requests for a model that has instances."""
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = _Lane()
        return lane.queue

    def start_or_queue(
        self, waiter: Waiter, ticket: AdmissionTicket, now: float, limit_tokens: float
    ) -> None:
        """Let a request start, or queue it. `limit_tokens`: that of `has_idle_capacity`; 0: others
        wait, of other tiers."""
        self.is_active = True
        lane, tenant = self._lanes[ticket.model], ticket.tenant
        if not len(lane.queue) and self._may_start(lane, ticket.model, limit_tokens):
            lane.window.start()
            return
        ticket.queue_entry = lane.queue.push(
            (waiter, ticket),
            tenant.name,
            ticket.prompt_tokens,
            deadline=now + self._max_wait_s,
            weight=tenant.weight,
            priority=tenant.priority,
        )

    def start_waiting(self, model: str, now: float, limit_tokens: float) -> None:
        """Start waiting requests for a model while capacity is idle."""
        lane = self._lanes.get(model)
        while lane is not None and len(lane.queue) and self._may_start(lane, model, limit_tokens):
            queued = lane.queue.pop()
            if queued is None:
                break
            waiter, ticket = queued
            ticket.admitted_at = now
            lane.window.start()
            contain(waiter.fail, waiter.admit)

    def release(self, ticket: AdmissionTicket, now: float, *, is_ok: bool) -> None:
        """A request has ended; `is_ok`: not cancelled, refused or failed."""
        lane = self._lanes[ticket.model]
        if ticket.queue_entry is not None and ticket.is_waiting:
            lane.queue.remove(ticket.queue_entry)
        else:
            lane.window.finish(now, is_ok=is_ok)
        if not len(lane.queue) and not lane.window.num_running:
            if ticket.model not in self._registry.models:
                del self._lanes[ticket.model]
            self.is_active = any(
                len(each.queue) or each.window.num_running for each in self._lanes.values()
            )

    def observe_stream(self, model: str, began_at: float, tpot_s: float, now: float) -> None:
        """A stream of another tier has ended; `began_at`: when its first byte came."""
        lane = self._lanes.get(model)
        if lane is not None:
            lane.window.observe_stream(began_at, tpot_s, self._tpot_target_s, now)

    def list_expired(self, now: float) -> list[tuple[Waiter, AdmissionTicket]]:
        """Requests that have waited too long; they stay until they are released."""
        return [each for lane in self._lanes.values() for each in lane.queue.list_expired(now)]

    def list_waiting_models(self) -> list[str]:
        """Models for which requests wait."""
        return [model for model, lane in self._lanes.items() if len(lane.queue)]

    def count_waiting(self) -> int:
        """Requests that wait."""
        return sum(len(lane.queue) for lane in self._lanes.values())

    def count_running(self) -> int:
        """Requests that have started."""
        return sum(lane.window.num_running for lane in self._lanes.values())

    def _may_start(self, lane: _Lane, model: str, limit_tokens: float) -> bool:
        entry = self._registry.models.get(model)
        if entry is None or not lane.window.is_open or limit_tokens <= 0:
            return False
        backlog = min((each.find_shortest_queue() for each in entry.score_tables), default=math.inf)
        if backlog > limit_tokens:
            return False
        usage = min(map(_measure_kv_usage, entry.instances), default=1.0)
        return has_idle_capacity(backlog, limit_tokens, usage)


def _measure_kv_usage(instance: RoutedInstance) -> float:
    """Used share of the KV of an instance that generates tokens; 1 if requests wait for a seat in
    its engine, or if it takes none. Prefill instances hold KV for a moment only."""
    load = instance.load
    is_decoding = instance.registration.role != ROLE_PREFILL and instance.selectable
    if not is_decoding or not has_seats(load.num_running, load.num_waiting):
        return 1.0
    return instance.in_flight.resident.pending / instance.kv_tokens
