"""Admission control: tenants' limits, fair queueing among them, refusal of late requests.

Called by requests at their start and end; the sweeper expires what waits too long. The decisions
are in `rate_limit`, `fair_queue` and `deadline`; this module combines them. What is hard: queueing
here is only worth its delay while engines have enough to do, so requests are held back only when
every instance that could compute the prompt has a good batch waiting. Without tenants and without
`late: Refuse` there is no queue, and requests skip this module, except those of the tier flex,
which wait for idle capacity (`flex_lanes`).
"""

import asyncio
import math
from collections.abc import Iterable
from http import HTTPStatus

from cleave.api.enums import LateRequestPolicy
from cleave.gateway.admission.deadline import predict_ttft_excess_s
from cleave.gateway.admission.flex_capacity import (
    BACKLOG_LIMIT_TOKENS as FLEX_BACKLOG_TOKENS,
)
from cleave.gateway.admission.flex_capacity import TTFT_SHARE as FLEX_TTFT_SHARE
from cleave.gateway.admission.flex_lanes import FlexLanes
from cleave.gateway.admission.rate_limit import SharedTenantUsage, TenantLimits, TenantUsage
from cleave.gateway.admission.tenants import DEFAULT_TENANT, Tenant
from cleave.gateway.admission.ticket import AdmissionTicket, TicketQueue, Waiter
from cleave.gateway.config import GatewayConfig
from cleave.gateway.event_loop_faults import contain
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.gateway.shared_state import SharedGatewayState
from cleave.policy.decayed_line import DecayedLine
from cleave.policy.dispatch import STALE_PENALTY
from cleave.router.registry import InstanceRegistry
from cleave.time_slices import Steps

BACKLOG_LIMIT_TOKENS = 8_192.0
"""Prompt tokens queued at every instance before requests are queued here: four batches of 2,048,
the size at which prefill saturates (Splitwise, section IV-B)."""
MIN_BACKLOG_LIMIT_TOKENS = 1_024.0
MAX_ADMITTED = 16
"""Requests admitted at a time: starting one takes 0.1 ms, during which nothing else is served."""
_REFUSE = LateRequestPolicy.REFUSE
BACKLOG_TTFT_SHARE = 0.5
"""Share of the TTFT target that may be spent waiting at an instance."""


class AdmissionController:
    """The admission controller of one gateway process."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: InstanceRegistry,
        metrics: GatewayMetrics,
        shared_state: SharedGatewayState | None = None,
        headroom_ms: float = 0.0,
    ) -> None:
        """`shared_state`: shared with other processes; counts tenants' usage. `headroom_ms`: of the
        router's rules."""
        self.is_disabled = True
        """No tenant has limits and no late request is refused, so requests need no admission."""
        self._late_policy = config.late_policy
        self._ttft_target_s = config.ttft_slo_ms / 1_000
        self._max_wait_s = config.timeouts.first_byte_s
        self._registry = registry
        self._metrics = metrics
        self._shared_state = shared_state
        self._headroom_ms = headroom_ms
        self._num_processes = shared_state.num_processes if shared_state is not None else 1
        self._usage_by_tenant: dict[str, TenantUsage] = {}
        self._queues: dict[str, TicketQueue] = {}
        self.flex = FlexLanes(registry, self._max_wait_s, config.tpot_slo_ms / 1_000)
        self._ttft_models: dict[str, DecayedLine] = {}
        """By model: seconds to the first token over the prompt tokens computed until then."""
        self._is_admitting = False
        self.has_waiters = asyncio.Event()
        """Set while any request is queued: then `admit_all_waiting` must be called regularly."""

    def set_tenants(self, tenants: Iterable[Tenant], now: float) -> None:
        """Set the tenants, at the start and whenever their file has changed."""
        by_name = {tenant.name: tenant for tenant in tenants}
        for name, usage in self._usage_by_tenant.items():
            # Requests of a removed tenant still run; new ones are no longer authenticated.
            usage.set_limits(by_name[name].limits if name in by_name else TenantLimits(), now)
        refuses = self._late_policy is LateRequestPolicy.REFUSE and self._ttft_target_s > 0
        self.is_disabled = not refuses and not (by_name.keys() - {DEFAULT_TENANT.name})

    def admit_or_queue(
        self,
        waiter: Waiter,
        tenant: Tenant,
        model: str,
        prompt_tokens: int,
        now: float,
        is_flex: bool = False,
    ) -> AdmissionTicket:
        """Admit a request, or queue it: `admit` or `reject` follows. Raises GatewayError (429).
        `is_flex`: it only fills idle capacity."""
        model = self._to_base(model)
        # Whether a model exists is the router's to say, at once.
        ticket = AdmissionTicket(
            tenant, model, prompt_tokens, now, is_flex and model in self._registry.models
        )
        if ticket.is_flex:
            self._reserve_usage(ticket, self.flex.get_queue(model), now)
            self.flex.start_or_queue(waiter, ticket, now, self._limit_flex_backlog(model))
            if ticket.is_waiting:
                self.has_waiters.set()
            return ticket
        backlog, instances = self._measure_backlog(model)
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = TicketQueue()
        # Connections are spread evenly, so the other processes have queues like this one.
        self._reject_if_late(ticket, backlog + self._num_processes * queue.total_cost / instances)
        self._reserve_usage(ticket, queue, now)
        ticket.backlog_tokens = backlog
        min_limit = min(MIN_BACKLOG_LIMIT_TOKENS, BACKLOG_LIMIT_TOKENS)
        if len(queue) or (backlog >= min_limit and backlog >= self._compute_backlog_limit(model)):
            wait_s = self._ttft_target_s if self._rejects_late(tenant) else self._max_wait_s
            ticket.queue_entry = queue.push(
                (waiter, ticket),
                tenant.name,
                prompt_tokens,
                deadline=now + wait_s,
                weight=tenant.weight,
                priority=tenant.priority,
            )
            self.has_waiters.set()
        else:
            self._record_wait(model, 0.0)
        return ticket

    def observe_first_token(self, ticket: AdmissionTicket, now: float) -> None:
        """The first token of an admitted request has arrived."""
        ttft_model = self._ttft_models.get(ticket.model)
        if ttft_model is None:
            ttft_model = self._ttft_models[ticket.model] = DecayedLine()
        ttft_model.observe(ticket.backlog_tokens + ticket.prompt_tokens, now - ticket.admitted_at)
        self.admit_waiting(ticket.model, now)

    def observe_stream(self, model: str, began_at: float, tpot_s: float, now: float) -> None:
        """A stream has ended beside requests of the tier flex; `began_at`: its first byte."""
        self.flex.observe_stream(self._to_base(model), began_at, tpot_s, now)

    def charge(self, ticket: AdmissionTicket, tokens: int, now: float) -> None:
        """A running request has so many tokens of prompt and output by now."""
        growth = tokens - ticket.charged_tokens
        if growth > 0:
            ticket.charged_tokens = tokens
            self._usage_by_tenant[ticket.tenant.name].charge(growth, now)

    def release(self, ticket: AdmissionTicket, tokens: int, now: float, *, is_ok: bool) -> None:
        """A request has ended, with so many tokens of prompt and output; `is_ok`: it was answered,
        not cancelled, refused or failed."""
        if ticket.is_flex:
            self.flex.release(ticket, now, is_ok=is_ok)
        elif ticket.queue_entry is not None and ticket.is_waiting:
            self._queues[ticket.model].remove(ticket.queue_entry)
        self._usage_by_tenant[ticket.tenant.name].release(tokens - ticket.charged_tokens, now)
        self.admit_waiting(ticket.model, now)

    def admit_waiting(self, model: str, now: float) -> None:
        """Admit queued requests of a model as long as an instance has room."""
        # `_is_admitting` stops the recursion of requests that end as soon as they are admitted.
        if self._is_admitting:
            return
        self._is_admitting = True
        try:
            queue = self._queues.get(model)
            # By length, because compiled code checks `not queue` for None only.
            if queue is not None and len(queue):
                self._admit_from(queue, model, now)
            if self.flex.is_active:
                self.flex.start_waiting(model, now, self._limit_flex_backlog(model))
        finally:
            self._is_admitting = False

    def admit_all_waiting(self, now: float) -> None:
        """Admit queued requests of all models: other processes' requests end unseen here."""
        for model in {*self._queues, *self.flex.list_waiting_models()}:
            self.admit_waiting(model, now)
        if not self.count_waiting() and not self.flex.count_waiting():
            self.has_waiters.clear()

    def expire_waiting(self, now: float) -> Steps[None]:
        """Refuse requests that have waited too long; admit those that can go on."""
        for model, queue in tuple(self._queues.items()):
            for waiter, ticket in queue.list_expired(now):
                if not ticket.is_waiting:
                    continue
                reason = "late" if self._rejects_late(ticket.tenant) else "waited_too_long"
                message = f"it has waited {now - ticket.arrived_at:.1f} s"
                error = self._build_rejection(ticket.tenant, reason, message)
                contain(waiter.fail, waiter.reject, error)
                yield
            self.admit_waiting(model, now)
            if not len(queue):
                # Clients may send any model name, so empty queues are removed.
                self._queues.pop(model, None)
            yield
        for waiter, ticket in self.flex.list_expired(now):
            if not ticket.is_waiting:
                continue
            message = f"no capacity was idle for {now - ticket.arrived_at:.0f} s"
            error = self._build_rejection(ticket.tenant, "no_idle_capacity", message)
            contain(waiter.fail, waiter.reject, error)
            yield

    def count_waiting(self) -> dict[str, int]:
        """Queued requests by model, except those of the tier flex."""
        return {model: len(queue) for model, queue in self._queues.items() if len(queue)}

    def _to_base(self, model: str) -> str:
        """The model whose instances and queue an adapter shares; else the same name."""
        entry = self._registry.models.get(model)
        return entry.base if entry is not None and entry.base else model

    def _reserve_usage(self, ticket: AdmissionTicket, queue: TicketQueue, now: float) -> None:
        """Count a request that may have to wait in `queue`. Raises GatewayError (429)."""
        tenant = ticket.tenant
        if queue.count(tenant.name) >= math.ceil(tenant.max_queued / self._num_processes):
            message = "too many of its requests wait"
            raise self._build_rejection(tenant, "tenant_queue_full", message)
        usage = self._usage_by_tenant.get(tenant.name)
        if usage is None:
            usage = self._usage_by_tenant[tenant.name] = self._create_usage(tenant, now)
        exceeded = usage.acquire(ticket.prompt_tokens, now)
        if exceeded is not None:
            reason, message = exceeded.reason, exceeded.message
            raise self._build_rejection(tenant, reason, message, exceeded.retry_after_s)

    def _admit_from(self, queue: TicketQueue, model: str, now: float) -> None:
        # Others follow at the next call, a few milliseconds later.
        for _ in range(MAX_ADMITTED):
            backlog = self._measure_backlog(model)[0]
            if backlog >= self._compute_backlog_limit(model) or (queued := queue.pop()) is None:
                break
            waiter, ticket = queued
            ticket.admitted_at, ticket.backlog_tokens = now, backlog
            self._record_wait(model, now - ticket.arrived_at)
            contain(waiter.fail, waiter.admit)

    def _create_usage(self, tenant: Tenant, now: float) -> TenantUsage:
        if self._shared_state is not None:
            table = self._shared_state.tenant_usage
            if (row := table.claim(tenant.name.encode())) is not None:
                return SharedTenantUsage(table, row, tenant.limits, now)
        return TenantUsage(tenant.limits, now)

    def _record_wait(self, model: str, seconds: float) -> None:
        # Clients may send any model name.
        if model in self._registry.models:
            self._metrics.models[model].queue.observe(seconds)

    def _reject_if_late(self, ticket: AdmissionTicket, backlog_tokens: float) -> None:
        ttft_model = self._ttft_models.get(ticket.model)
        if ttft_model is None or not self._rejects_late(ticket.tenant):
            return
        tokens, target_s = ticket.prompt_tokens, self._ttft_target_s
        excess_s = predict_ttft_excess_s(ttft_model, backlog_tokens, tokens, target_s)
        if excess_s > 0:
            message = f"its first token would come {excess_s:.1f} s too late"
            raise self._build_rejection(ticket.tenant, "late", message, excess_s)

    def _rejects_late(self, tenant: Tenant) -> bool:
        return self._ttft_target_s > 0 and (tenant.late or self._late_policy) is _REFUSE

    def _compute_backlog_limit(self, model: str) -> float:
        """Prompt tokens in the shortest queue from which requests are queued here. Prompts that
        mixed instances are to take must not be held back: they take them from the headroom on."""
        limit, ttft_model = BACKLOG_LIMIT_TOKENS, self._ttft_models.get(model)
        if ttft_model is not None and (
            tokens := ttft_model.compute_growth(BACKLOG_TTFT_SHARE * self._ttft_target_s)
        ):
            limit = min(max(tokens, MIN_BACKLOG_LIMIT_TOKENS), limit)
        entry = self._registry.models.get(model)
        if entry is None or not self._headroom_ms:
            return limit
        return limit + max(each.find_headroom(self._headroom_ms) for each in entry.score_tables)

    def _limit_flex_backlog(self, model: str) -> float:
        """Prompt tokens in the shortest queue up to which a request of the tier flex may start."""
        queue, ttft_model = self._queues.get(model), self._ttft_models.get(model)
        if queue is not None and len(queue):
            return 0.0
        limit = FLEX_BACKLOG_TOKENS
        if ttft_model is None or not self._ttft_target_s:
            return limit
        tokens = ttft_model.compute_growth(FLEX_TTFT_SHARE * self._ttft_target_s)
        return min(tokens, limit) if tokens else limit

    def _measure_backlog(self, model: str) -> tuple[float, int]:
        """(prompt tokens in the shortest queue of any instance, instances that compute prompts)."""
        shortest, instances = math.inf, 0
        entry = self._registry.models.get(model)
        for score_table in entry.score_tables if entry is not None else ():
            shortest = min(shortest, score_table.find_shortest_queue())
            instances += len(score_table.prompt_slots)
        # Stale instances or none at all are no reason to queue; the router reports them at once.
        return shortest if shortest < STALE_PENALTY else 0.0, max(instances, 1)

    def _build_rejection(
        self, tenant: Tenant, reason: str, message: str, retry_after_s: float = 1.0
    ) -> GatewayError:
        self._metrics.rejections[tenant.name, reason] += 1
        message = f"tenant {tenant.name!r}: {message}" if tenant.name else message
        status, wait_s = HTTPStatus.TOO_MANY_REQUESTS, max(1, math.ceil(retry_after_s))
        return GatewayError(status, message, "rate_limit_error", reason, retry_after_s=wait_s)
