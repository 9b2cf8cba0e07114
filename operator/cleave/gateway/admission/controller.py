"""Admission control: tenants' limits, fair queueing among tenants, refusal of requests that would
be late.

Called by exchanges at their start and end; the sweeper expires what waits too long. The decisions
are in `rate_limit`, `fair_queue` and `deadline`; this module combines them. What is hard: queueing
here is only worth its delay while engines have enough to do, so requests are held back only when
every instance that could compute the prompt has a good batch waiting. Without tenants and without
`late: Refuse` there is no queue, and requests skip this module.
"""

import asyncio
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from cleave.gateway.admission.deadline import FirstTokenModel, find_excess_s
from cleave.gateway.admission.fair_queue import FairQueue, Place
from cleave.gateway.admission.rate_limit import Account, Limits
from cleave.gateway.admission.shared_rate_limit import SharedAccount
from cleave.gateway.admission.tenants import EVERYBODY, Tenant
from cleave.gateway.config import GatewayConfig, Late
from cleave.gateway.http.errors import ApiError
from cleave.gateway.metrics.gateway_metrics import Metrics
from cleave.gateway.shared_state import Siblings
from cleave.policy.dispatch import STALE
from cleave.router.registry import Directory

HOLD_TOKENS = 8_192.0
"""Prompt tokens queued at every instance before requests are queued here: four batches of 2,048,
the size at which prefill saturates (Splitwise, section IV-B)."""
LEAST_HOLD_TOKENS = 1_024.0
_REFUSE = Late.REFUSE
HOLD_SHARE = 0.5
"""Share of the TTFT target that may be spent waiting at an instance."""


class Entrant(Protocol):
    """A request that asks for admission."""

    def admit(self) -> None:
        """Called when a queued request may go on."""

    def turn_away(self, error: ApiError) -> None:
        """Called when a queued request is refused."""


class Visit:
    """A request that was admitted or waits for it; to be given back with `Door.leave`."""

    __slots__ = ("admitted_at", "ahead", "arrived_at", "model", "place", "prompt_tokens", "tenant")

    def __init__(self, tenant: Tenant, model: str, prompt_tokens: int, now: float) -> None:
        self.tenant = tenant
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.arrived_at = self.admitted_at = now
        self.ahead = 0.0
        """Prompt tokens queued before it at the instance with the shortest queue."""
        self.place: Place[tuple[Entrant, Visit]] | None = None
        """Its entry in the queue; None: it was admitted at once."""

    @property
    def waits(self) -> bool:
        """Whether it is still queued."""
        return self.place is not None and self.place.item is not None


class Door:
    """The admission controller of one gateway process."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Directory,
        metrics: Metrics,
        shared_state: Siblings | None = None,
    ) -> None:
        """`shared_state`: shared with other processes; counts tenants' usage."""
        self.open = True
        """No tenant has limits and no late request is refused, so requests need no admission."""
        self._late = config.late
        self._target_s = config.ttft_slo_ms / 1_000
        self._wait_s = config.timeouts.first_byte_s
        self._directory = registry
        self._metrics = metrics
        self._siblings = shared_state
        self._processes = shared_state.count if shared_state is not None else 1
        self._accounts: dict[str, Account] = {}
        self._queues: dict[str, FairQueue[tuple[Entrant, Visit]]] = {}
        self._models: dict[str, FirstTokenModel] = {}
        self._pumping = False
        self.waited_for = asyncio.Event()
        """Set while any request is queued: then `let_in` must be called regularly."""

    def know(self, tenants: Iterable[Tenant], now: float) -> None:
        """Set the tenants, at the start and whenever their file has changed."""
        by_name = {tenant.name: tenant for tenant in tenants}
        for name, account in self._accounts.items():
            # Requests of a removed tenant still run; new ones are no longer authenticated.
            account.change(by_name[name].limits if name in by_name else Limits(), now)
        refuses = self._late is Late.REFUSE and self._target_s > 0
        self.open = not refuses and not (by_name.keys() - {EVERYBODY.name})

    def enter(
        self, waiter: Entrant, tenant: Tenant, model: str, prompt_tokens: int, now: float
    ) -> Visit:
        """Admit a request, or queue it: then `admit` or `turn_away` is called later.

        Raises ApiError (429) when it is refused.
        """
        entry = self._directory.models.get(model)
        if entry is not None and entry.base:
            # Adapters run on the instances of their base model, so they share its queue.
            model = entry.base
        ticket = Visit(tenant, model, prompt_tokens, now)
        backlog, instances = self._measure(model)
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = FairQueue()
        # Connections are spread evenly, so the other processes have queues like this one.
        self._check_lateness(ticket, backlog + self._processes * queue.cost / instances)
        if queue.count(tenant.name) >= math.ceil(tenant.max_queued / self._processes):
            raise self._shed(tenant, "tenant_queue_full", "too many of its requests wait", 1.0)
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = self._open_account(tenant, now)
        refusal = account.enter(prompt_tokens, now)
        if refusal is not None:
            raise self._shed(tenant, refusal.reason, refusal.message, refusal.retry_after_s)
        ticket.ahead = backlog
        min_limit = min(LEAST_HOLD_TOKENS, HOLD_TOKENS)
        if len(queue) or (backlog >= min_limit and backlog >= self._find_hold(model)):
            ticket.place = queue.push(
                (waiter, ticket),
                tenant.name,
                prompt_tokens,
                weight=tenant.weight,
                priority=tenant.priority,
                until=now + (self._target_s if self._refuses(tenant) else self._wait_s),
            )
            self.waited_for.set()
        else:
            self._note_wait(model, 0.0)
        return ticket

    def observe(self, ticket: Visit, now: float) -> None:
        """The first token of an admitted request has come."""
        ttft_model = self._models.get(ticket.model)
        if ttft_model is None:
            ttft_model = self._models[ticket.model] = FirstTokenModel()
        ttft_model.observe(ticket.ahead + ticket.prompt_tokens, now - ticket.admitted_at)
        self.pump(ticket.model, now)

    def leave(self, ticket: Visit, output_tokens: int, now: float) -> None:
        """A request has ended, in whatever way."""
        if ticket.place is not None and ticket.waits:
            self._queues[ticket.model].remove(ticket.place)
        self._accounts[ticket.tenant.name].leave(output_tokens, now)
        self.pump(ticket.model, now)

    def pump(self, model: str, now: float) -> None:
        """Admit queued requests of a model as long as an instance has room."""
        queue = self._queues.get(model)
        # By length, because compiled code checks `not queue` for None only. `_pumping` stops
        # the recursion of requests that end as soon as they are admitted.
        if queue is None or not len(queue) or self._pumping:
            return
        self._pumping = True
        try:
            while (backlog := self._measure(model)[0]) < self._find_hold(model):
                queued = queue.pop()
                if queued is None:
                    break
                waiter, ticket = queued
                ticket.admitted_at, ticket.ahead = now, backlog
                self._note_wait(model, now - ticket.arrived_at)
                waiter.admit()
        finally:
            self._pumping = False

    def let_in(self, now: float) -> None:
        """Admit queued requests of all models: this process does not see when requests of other
        processes and gateways end."""
        for model in tuple(self._queues):
            self.pump(model, now)
        if not self.count_waiting():
            self.waited_for.clear()

    def sweep(self, now: float) -> None:
        """Refuse requests that have waited too long; admit those that can go on."""
        for model, queue in tuple(self._queues.items()):
            for waiter, ticket in queue.find_late(now):
                reason = "late" if self._refuses(ticket.tenant) else "waited_too_long"
                message = f"it has waited {now - ticket.arrived_at:.1f} s"
                waiter.turn_away(self._shed(ticket.tenant, reason, message, 1.0))
            self.pump(model, now)
            if not len(queue):
                # Clients may send any model name, so empty queues are removed.
                del self._queues[model]

    def count_waiting(self) -> dict[str, int]:
        """Queued requests by model."""
        return {model: len(queue) for model, queue in self._queues.items() if len(queue)}

    def _open_account(self, tenant: Tenant, now: float) -> Account:
        if self._siblings is not None:
            table = self._siblings.accounts
            row = table.claim(tenant.name.encode())
            if row is not None:
                return SharedAccount(table, row, tenant.limits, now)
        return Account(tenant.limits, now)

    def _note_wait(self, model: str, seconds: float) -> None:
        # Clients may send any model name.
        if model in self._directory.models:
            self._metrics.models[model].queue.observe(seconds)

    def _check_lateness(self, ticket: Visit, backlog_tokens: float) -> None:
        ttft_model = self._models.get(ticket.model)
        if ttft_model is None or not self._refuses(ticket.tenant):
            return
        excess_s = find_excess_s(ttft_model, backlog_tokens, ticket.prompt_tokens, self._target_s)
        if excess_s > 0:
            message = f"its first token would come {excess_s:.1f} s too late"
            raise self._shed(ticket.tenant, "late", message, excess_s)

    def _refuses(self, tenant: Tenant) -> bool:
        return self._target_s > 0 and (tenant.late or self._late) is _REFUSE

    def _find_hold(self, model: str) -> float:
        ttft_model = self._models.get(model)
        tokens = (
            ttft_model.find_tokens(HOLD_SHARE * self._target_s) if ttft_model is not None else None
        )
        return min(max(tokens, LEAST_HOLD_TOKENS), HOLD_TOKENS) if tokens else HOLD_TOKENS

    def _measure(self, model: str) -> tuple[float, int]:
        """(prompt tokens in the shortest queue of any instance, instances that compute prompts)."""
        shortest, instances = math.inf, 0
        entry = self._directory.models.get(model)
        for board in entry.boards if entry is not None else ():
            shortest = min(shortest, board.find_shortest_queue())
            instances += len(board.computing)
        # Stale instances or none at all are no reason to queue; the router reports them at once.
        return shortest if shortest < STALE else 0.0, max(instances, 1)

    def _shed(self, tenant: Tenant, reason: str, message: str, retry_after_s: float) -> ApiError:
        self._metrics.shed[tenant.name, reason] += 1
        owner = f"tenant {tenant.name!r}: " if tenant.name else ""
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{owner}{message}",
            "rate_limit_error",
            code=reason,
            retry_after_s=max(1, math.ceil(retry_after_s)),
        )
