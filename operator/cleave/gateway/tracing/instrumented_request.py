"""An exchange and its attempts that fill a record of their request. Made by `recorder`.

They override steps of the plain classes, so that unrecorded requests do not pay for any check.
"""

from http import HTTPStatus

from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.context import Context
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http.completion_request import Completion
from cleave.gateway.http.errors import ApiError
from cleave.gateway.proxy.attempt import Asker, Attempt
from cleave.gateway.proxy.client_stream import Client
from cleave.gateway.proxy.proxied_request import Exchange
from cleave.gateway.proxy.sse_relay import Relay
from cleave.gateway.tracing.request_record import Leg, Listener, Story, Try
from cleave.gateway.upstream.connection_pool import Call, EnginePool
from cleave.gateway.upstream.kv_transfer_params import count_blocks
from cleave.router.instance import Target
from cleave.router.router import Pick


class WatchedAttempt(Attempt):
    """One attempt of a recorded request."""

    __slots__ = ("_story", "_told")

    def __init__(
        self,
        context: Context,
        asker: Asker,
        path: bytes,
        completion: Completion,
        pick: Pick,
        fields: bytes,
    ) -> None:
        super().__init__(context, asker, path, completion, pick, fields)
        assert isinstance(asker, WatchedExchange)
        self._story: Story = asker.story
        self._told = Try(pick, asker.way, context.clock())
        self._story.tries.append(self._told)

    def _send(self, pool: EnginePool, body: bytes) -> None:
        if self._ahead is not None:
            self._begin_leg("decode", self.pick.decode)
        else:
            phase = "prefill" if self.prefill else "decode" if self.pick.prefill else "whole"
            self._begin_leg(phase, self.target)
        super()._send(pool, body)

    def _send_both(self, prefill: Target, pool: EnginePool, decode: EnginePool) -> None:
        self._begin_leg("prefill", prefill)
        super()._send_both(prefill, pool, decode)

    def _hand_over(self, prefill: Target, body: bytes) -> None:
        self._end_leg(-1, body)
        super()._hand_over(prefill, body)

    def prefilled(self, prefill: Target, body: bytes) -> None:
        """The overlapped prefill is done."""
        self._end_leg(-2, body)
        super().prefilled(prefill, body)

    def _begin_leg(self, phase: str, target: Target) -> None:
        call = Leg(phase, target, self._context.clock())
        self._told.legs.append(call)
        if self._story.trace is not None:
            self._fields = self._story.trace.write(call.span_id)

    def _end_leg(self, index: int, body: bytes) -> None:
        call = self._told.legs[index]
        call.ended_at, call.blocks = self._context.clock(), count_blocks(body)


class WatchedExchange(Exchange):
    """A request that is recorded."""

    _attempt_type = WatchedAttempt

    def __init__(
        self,
        listener: Listener,
        record: Story,
        context: Context,
        client: Client,
        path: bytes,
        request_id: bytes,
        body: Completion,
        tenant: Tenant,
        session: bytes | None,
    ) -> None:
        super().__init__(context, client, path, request_id, body, tenant, session)
        self._listener = listener
        self.story = record
        record.max_tokens = body.output_tokens

    @property
    def way(self) -> str:
        """How the next attempt relates to those before: again, continued or replayed."""
        if self._rescue is None or not self.story.tries:
            return ""
        return self._rescue.how if self._relay is not None else "again"

    def begin(self, call: Call) -> None:
        """A stream has begun."""
        record, now = self.story, self._context.clock()
        record.tries[-1].legs[-1].first_at = now
        if not record.first_at:
            record.first_at, record.status = now, call.status
        super().begin(call)

    def fail(self, failure: Failure, reason: str) -> None:
        """The attempt failed."""
        assert self._attempt is not None
        name = self._attempt.target.instance
        self.story.fail(name, failure.value, reason, self._context.clock())
        super().fail(failure, reason)

    def _answer_error(self, error: ApiError, outcome: str) -> None:
        self.story.error = error.code or error.type
        super()._answer_error(error, outcome)

    def _break_off(self, relay: Relay, error: ApiError) -> None:
        self.story.error = error.code or error.type
        super()._break_off(relay, error)

    def _respond(self, status: int, fields: bytes, body: bytes, outcome: str) -> None:
        self.story.status = HTTPStatus(status)
        super()._respond(status, fields, body, outcome)

    def _end(self, outcome: str) -> None:
        if self not in self._context.exchanges:
            return
        super()._end(outcome)
        record = self.story
        record.prompt_tokens = self._prompt_tokens
        record.output_tokens = self._output_tokens
        record.end(outcome, self._context.clock())
        self._listener.tell(record)
