"""Lets requests in: limits of their tenant, their turn among tenants, and whether it is too late.

Asked by exchanges at their start and told of their end; the sweeper looks after those that wait.
What is decided is decided elsewhere (`limits`, `fairness`, `lateness`), here it is put together.
What is hard: a queue here is only worth its wait while engines have enough to do, so requests are
held back only when every instance that would compute the prompt has a good batch waiting already;
without tenants and without `late: Refuse` there is no queue and nothing to ask.
"""

import asyncio
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from cleave.gateway.admission.fairness import FairQueue, Place
from cleave.gateway.admission.lateness import FirstTokenModel, find_excess_s
from cleave.gateway.admission.limits import Account, Limits
from cleave.gateway.admission.shared_limits import SharedAccount
from cleave.gateway.admission.tenants import EVERYBODY, Tenant
from cleave.gateway.config import GatewayConfig, Late
from cleave.gateway.counts.metrics import Metrics
from cleave.gateway.errors import ApiError
from cleave.gateway.siblings import Siblings
from cleave.policy.dispatch import STALE
from cleave.router.directory import Directory

HOLD_TOKENS = 8_192.0
"""Prompt tokens that wait at every instance before requests wait here: four batches of 2,048, the
size at which prompts saturate (Splitwise, section IV-B)."""
LEAST_HOLD_TOKENS = 1_024.0
_REFUSE = Late.REFUSE
HOLD_SHARE = 0.5
"""Of the target, that may be spent waiting at an instance."""


class Entrant(Protocol):
    """Who wants in."""

    def admit(self) -> None:
        """It is its turn."""

    def turn_away(self, error: ApiError) -> None:
        """It has waited in vain."""


class Visit:
    """A request that was let in, or waits for it."""

    __slots__ = ("admitted_at", "ahead", "arrived_at", "model", "place", "prompt_tokens", "tenant")

    def __init__(self, tenant: Tenant, model: str, prompt_tokens: int, now: float) -> None:
        self.tenant = tenant
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.arrived_at = self.admitted_at = now
        self.ahead = 0.0
        """Prompt tokens before it, where it is computed."""
        self.place: Place[tuple[Entrant, Visit]] | None = None
        """In the queue; None: it went in at once."""

    @property
    def waits(self) -> bool:
        """Whether its turn is still to come."""
        return self.place is not None and self.place.item is not None


class Door:
    """The door of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: Directory,
        metrics: Metrics,
        siblings: Siblings | None = None,
    ) -> None:
        """`siblings`: with whom tenants' accounts are kept."""
        self.open = True
        """Nobody has limits and nobody is refused for being late: there is nothing to ask."""
        self._late = config.late
        self._target_s = config.ttft_slo_ms / 1_000
        self._wait_s = config.timeouts.first_byte_s
        self._directory = directory
        self._metrics = metrics
        self._siblings = siblings
        self._processes = siblings.count if siblings is not None else 1
        self._accounts: dict[str, Account] = {}
        self._queues: dict[str, FairQueue[tuple[Entrant, Visit]]] = {}
        self._models: dict[str, FirstTokenModel] = {}
        self._pumping = False
        self.waited_for = asyncio.Event()
        """Set while anybody waits: then `let_in` should be called now and then."""

    def know(self, tenants: Iterable[Tenant], now: float) -> None:
        """The tenants, at the start and whenever their file has changed."""
        named = {tenant.name: tenant for tenant in tenants}
        for name, account in self._accounts.items():
            # Requests of a tenant that is gone still run; new ones have no key any more.
            account.change(named[name].limits if name in named else Limits(), now)
        refuses = self._late is Late.REFUSE and self._target_s > 0
        self.open = not refuses and not (named.keys() - {EVERYBODY.name})

    def enter(
        self, entrant: Entrant, tenant: Tenant, model: str, prompt_tokens: int, now: float
    ) -> Visit:
        """Let a request in, or let it wait: then `admit` or `turn_away` follows.

        Raises ApiError (429) when it is not taken.
        """
        known = self._directory.models.get(model)
        if known is not None and known.base:
            # Adapters wait for their base's instances, so they have their turns in one queue.
            model = known.base
        visit = Visit(tenant, model, prompt_tokens, now)
        backlog, instances = self._measure(model)
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = FairQueue()
        # Siblings have queues like this one, as connections are spread over all.
        self._check_lateness(visit, backlog + self._processes * queue.cost / instances)
        if queue.count(tenant.name) >= math.ceil(tenant.max_queued / self._processes):
            raise self._shed(tenant, "tenant_queue_full", "too many of its requests wait", 1.0)
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = self._open_account(tenant, now)
        refusal = account.enter(prompt_tokens, now)
        if refusal is not None:
            raise self._shed(tenant, refusal.reason, refusal.message, refusal.retry_after_s)
        visit.ahead = backlog
        least_hold = min(LEAST_HOLD_TOKENS, HOLD_TOKENS)
        if len(queue) or (backlog >= least_hold and backlog >= self._find_hold(model)):
            visit.place = queue.push(
                (entrant, visit),
                tenant.name,
                prompt_tokens,
                weight=tenant.weight,
                priority=tenant.priority,
                until=now + (self._target_s if self._refuses(tenant) else self._wait_s),
            )
            self.waited_for.set()
        else:
            self._note_wait(model, 0.0)
        return visit

    def observe(self, visit: Visit, now: float) -> None:
        """Its first token has come."""
        known = self._models.get(visit.model)
        if known is None:
            known = self._models[visit.model] = FirstTokenModel()
        known.observe(visit.ahead + visit.prompt_tokens, now - visit.admitted_at)
        self.pump(visit.model, now)

    def leave(self, visit: Visit, output_tokens: int, now: float) -> None:
        """It has ended, one way or another."""
        if visit.place is not None and visit.waits:
            self._queues[visit.model].remove(visit.place)
        self._accounts[visit.tenant.name].leave(output_tokens, now)
        self.pump(visit.model, now)

    def pump(self, model: str, now: float) -> None:
        """Let in who waits, as long as an instance has room."""
        queue = self._queues.get(model)
        # By its length: compiled, `not queue` asks for None only.
        if queue is None or not len(queue) or self._pumping:
            # One that ends as soon as it is let in would let the next one in, and so on.
            return
        self._pumping = True
        try:
            while (backlog := self._measure(model)[0]) < self._find_hold(model):
                turn = queue.pop()
                if turn is None:
                    break
                entrant, visit = turn
                visit.admitted_at, visit.ahead = now, backlog
                self._note_wait(model, now - visit.arrived_at)
                entrant.admit()
        finally:
            self._pumping = False

    def let_in(self, now: float) -> None:
        """Look after all who wait: what siblings and other gateways have sent ends unheard here."""
        for model in tuple(self._queues):
            self.pump(model, now)
        if not self.count_waiting():
            self.waited_for.clear()

    def sweep(self, now: float) -> None:
        """Turn away who has waited too long; let in who can go."""
        for model, queue in tuple(self._queues.items()):
            for entrant, visit in queue.find_late(now):
                reason = "late" if self._refuses(visit.tenant) else "waited_too_long"
                message = f"it has waited {now - visit.arrived_at:.1f} s"
                entrant.turn_away(self._shed(visit.tenant, reason, message, 1.0))
            self.pump(model, now)
            if not len(queue):
                # Clients name models, so what nobody waits for is not kept.
                del self._queues[model]

    def count_waiting(self) -> dict[str, int]:
        """Requests that wait here, by model."""
        return {model: len(queue) for model, queue in self._queues.items() if len(queue)}

    def _open_account(self, tenant: Tenant, now: float) -> Account:
        if self._siblings is not None:
            table = self._siblings.accounts
            row = table.claim(tenant.name.encode())
            if row is not None:
                return SharedAccount(table, row, tenant.limits, now)
        return Account(tenant.limits, now)

    def _note_wait(self, model: str, seconds: float) -> None:
        # Clients may name anything a model.
        if model in self._directory.models:
            self._metrics.models[model].queue.observe(seconds)

    def _check_lateness(self, visit: Visit, ahead: float) -> None:
        known = self._models.get(visit.model)
        if known is None or not self._refuses(visit.tenant):
            return
        excess_s = find_excess_s(known, ahead, visit.prompt_tokens, self._target_s)
        if excess_s > 0:
            message = f"its first token would come {excess_s:.1f} s too late"
            raise self._shed(visit.tenant, "late", message, excess_s)

    def _refuses(self, tenant: Tenant) -> bool:
        return self._target_s > 0 and (tenant.late or self._late) is _REFUSE

    def _find_hold(self, model: str) -> float:
        known = self._models.get(model)
        tokens = known.find_tokens(HOLD_SHARE * self._target_s) if known is not None else None
        return min(max(tokens, LEAST_HOLD_TOKENS), HOLD_TOKENS) if tokens else HOLD_TOKENS

    def _measure(self, model: str) -> tuple[float, int]:
        """(prompt tokens that wait where the fewest do, instances that compute prompts)."""
        least, instances = math.inf, 0
        known = self._directory.models.get(model)
        for board in known.boards if known is not None else ():
            least = min(least, board.find_shortest_queue())
            instances += len(board.computing)
        # One that is not heard is no place to wait for; nor is none at all, which is told at once.
        return least if least < STALE else 0.0, max(instances, 1)

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
