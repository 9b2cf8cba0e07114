"""A request that the proxy sends directly to an instance: its load accounting and its metrics.

Made by the endpoint picker, which receives the response messages from the proxy. What is hard: the
proxy may disappear at any time, or never report the response; so the accounting ends with the
ext_proc stream, and there is a deadline, too.
"""

import asyncio
import re
from collections.abc import Collection
from http import HTTPStatus

from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.admission.ticket import AdmissionTicket
from cleave.gateway.context import GatewayContext
from cleave.gateway.http.completion_request import (
    CompletionRequest,
    get_cache_salt,
    get_prompt_text,
    set_engine_model,
)
from cleave.gateway.http.errors import (
    INTERNAL_FAULT,
    GatewayError,
    build_engine_error,
    convert_router_error,
)
from cleave.gateway.metrics.gateway_metrics import record_completed
from cleave.router.errors import QueueFull
from cleave.router.instance import Target
from cleave.router.router import Pick, RequestPhase, Router

_TAIL_BYTES = 1_024
"""Of a response, its last bytes, which contain the usage."""
_EVENT_END = b"}\n\n"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,12})')


class DirectRequest:
    """One request: `wait_for_admission`, `pick_instance`, response callbacks; always `end`."""

    def __init__(
        self, context: GatewayContext, completion: CompletionRequest, tenant: Tenant
    ) -> None:
        self._context = context
        self._completion = completion
        self._tenant = tenant
        self._pick: Pick | None = None
        self._sender = ""
        self._ticket: AdmissionTicket | None = None
        self._admitted: asyncio.Future[None] | None = None
        self._started_at = self._deadline = context.clock()
        self._first_byte_at: float | None = None
        self._status = 0
        self._events = 0
        self._tail = b""
        self._served_elsewhere = self._has_ended = False
        context.active_requests.add(self)
        context.num_awaiting_first_byte += 1
        context.metrics.in_flight += 1

    @property
    def model(self) -> str:
        """As the client named it."""
        return self._completion.model

    async def wait_for_admission(self) -> None:
        """Wait for admission. Raises GatewayError (429)."""
        context = self._context
        self._deadline += context.config.timeouts.response_s
        if context.num_awaiting_first_byte > context.queue_limit:
            context.metrics.rejections[self._tenant.name, "queue_full"] += 1
            raise convert_router_error(QueueFull("too many requests wait already"))
        if context.admission.is_disabled:
            return
        completion = self._completion
        self._ticket = context.admission.admit_or_queue(
            self, self._tenant, completion.model, completion.prompt_tokens, self._started_at
        )
        if self._ticket.is_waiting:
            self._admitted = asyncio.get_running_loop().create_future()
            await self._admitted

    def pick_instance(
        self, excluded: Collection[str], session: bytes | None, sender: str
    ) -> Target:
        """Pick an instance, none of `excluded`. Raises RouterError."""
        context, completion, router = self._context, self._completion, self._context.router
        senders, registry = context.suspect_senders, router.registry
        if senders.is_suspect(sender, registry, context.clock()):
            excluded = [*excluded, *senders.list_closed(sender, completion.model, registry)]
        is_split = has_prefill_instance(router, completion.model)
        self._pick = router.pick(
            completion.model,
            completion.prompt_tokens,
            completion.output_tokens,
            colocated=is_split or not completion.can_disaggregate,
            excluded=excluded,
            suspect=context.circuit_breaker.list_suspects(context.clock()),
            session=session,
            text=get_prompt_text(completion) if router.uses_prompt_text else b"",
            salt=get_cache_salt(completion) if router.uses_prompt_text else b"",
        )
        context.metrics.dispatches[completion.model, self._pick.reason] += 1
        senders.record_start(sender, completion.model, self._pick, registry, context.clock())
        self._sender = sender
        if self._pick.engine_model:
            completion.fields = set_engine_model(completion, self._pick.engine_model).fields
        return self._pick.decode

    # --- called by the admission controller and the sweeper ---

    def admit(self) -> None:
        """The admission controller lets the queued request through."""
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_result(None)

    def reject(self, error: GatewayError) -> None:
        """The admission controller refuses the queued request."""
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_exception(error)

    def check_deadline(self, now: float) -> None:
        """End the accounting after too long without a message; the proxy has its own time-out."""
        if now > self._deadline:
            status = HTTPStatus.GATEWAY_TIMEOUT
            self.reject(build_engine_error(status, "no instance could take it in time"))
            self.end("broken")

    def fail(self) -> None:
        """A fault of this program has interrupted it."""
        self.reject(INTERNAL_FAULT)
        self.end("failed")

    # --- called with messages of the response ---

    def on_response_head(self, status: int, served: str) -> None:
        """The head of the response. `served`: the endpoint it is from, empty if unknown."""
        self._status = status
        context, pick, breaker = self._context, self._pick, self._context.circuit_breaker
        if pick is None:
            return
        is_elsewhere = bool(served) and served != pick.decode.endpoint
        if is_elsewhere or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            breaker.record_failure(pick.decode.instance, context.clock())
        else:
            breaker.record_success(pick.decode.instance)
            context.suspect_senders.record_answer(self._sender, pick)
        if is_elsewhere:
            # Another endpoint responded: a gateway, which does its own accounting and counting.
            context.router.release(pick)
            self._pick, self._served_elsewhere = None, True

    def on_response_body(self, piece: bytes) -> None:
        """A piece of the response's body."""
        context = self._context
        if self._has_ended:
            return
        now = context.clock()
        self._deadline = now + context.config.timeouts.response_s
        tail = self._tail + piece
        # A match that spans two pieces is counted with the second one.
        self._events += tail.count(_EVENT_END) - self._tail.count(_EVENT_END)
        self._tail = tail[-_TAIL_BYTES:]
        if self._first_byte_at is None and piece:
            self._first_byte_at = now
            context.num_awaiting_first_byte -= 1
            # An error is no proof that the prompt has been computed.
            if self._pick is not None and self._status < HTTPStatus.BAD_REQUEST:
                context.router.release(self._pick, RequestPhase.PREFILL)
            if self._ticket is not None:
                context.admission.observe_first_token(self._ticket, now)

    def on_response_complete(self) -> None:
        """The response is complete."""
        status = self._status
        self.end("failed" if status >= 500 else "refused" if status >= 400 else "ok")

    def end(self, outcome: str) -> None:
        """Release the accounting and count the outcome; calls after the first do nothing."""
        context = self._context
        if self._has_ended:
            return
        self._has_ended = True
        context.active_requests.discard(self)
        if self._first_byte_at is None:
            context.num_awaiting_first_byte -= 1
        tokens = 0 if self._served_elsewhere else self._count_tokens()
        if self._pick is not None:
            if outcome == "ok" and tokens:
                context.router.observe_completion(self._pick, tokens)
            context.router.release(self._pick)
        self._record_outcome(outcome, tokens)
        if self._ticket is not None:
            is_ok = outcome == "ok"
            charged = self._completion.prompt_tokens + tokens
            context.admission.release(self._ticket, charged, context.clock(), is_ok=is_ok)

    def _count_tokens(self) -> int:
        """As the engine counts them, or else the number of events."""
        counts = _COMPLETION_TOKENS.findall(self._tail)
        return int(counts[-1]) if counts else self._events

    def _record_outcome(self, outcome: str, tokens: int) -> None:
        context, completion = self._context, self._completion
        context.metrics.in_flight -= 1
        if self._served_elsewhere:
            return
        stream_s = None
        if outcome == "ok" and completion.stream and self._first_byte_at is not None:
            stream_s = self._first_byte_at - self._started_at, context.clock() - self._first_byte_at
        is_known = completion.model in context.router.registry.known_models
        model, tenant = completion.model if is_known else "", self._tenant.name
        prompt = completion.prompt_tokens
        record_completed(context.metrics, model, tenant, outcome, prompt, tokens, stream_s)


def has_prefill_instance(router: Router, model: str) -> bool:
    """Whether requests for this model are currently split if possible."""
    entry = router.registry.models.get(model)
    return entry is not None and any(table.prefill.size for table in entry.score_tables)
