"""A request that the proxy sends directly to an instance: its load accounting and its metrics.

Made by the endpoint picker, which receives the response messages from the proxy. What is hard: the
proxy may disappear at any time, or never report the response; so the accounting ends with the
ext_proc stream, and there is a deadline, too.
"""

import asyncio
import re
from collections.abc import Collection
from http import HTTPStatus

from cleave.gateway.admission.controller import Visit
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.context import Context
from cleave.gateway.http.completion_request import Completion, find_text
from cleave.gateway.http.errors import ApiError, fail_engine, from_router
from cleave.gateway.metrics.request_outcomes import count
from cleave.router.errors import QueueFull
from cleave.router.instance import Target
from cleave.router.router import Phase, Pick, Router

_TAIL_BYTES = 1_024
"""Of a response, its last bytes, which contain the usage."""
_EVENT_END = b"}\n\n"
_COUNTED = re.compile(rb'"completion_tokens":\s*(\d+)')


class Direct:
    """One request. Call `enter`, `pick`, the callbacks of the response, and in any case `end`."""

    def __init__(self, context: Context, completion: Completion, tenant: Tenant) -> None:
        self._context = context
        self._completion = completion
        self._tenant = tenant
        self._pick: Pick | None = None
        self._visit: Visit | None = None
        self._turn: asyncio.Future[None] | None = None
        self._started = self._deadline = context.clock()
        self._began: float | None = None
        self._status = 0
        self._events = 0
        self._tail = b""
        self._elsewhere = self._over = False
        context.exchanges.add(self)
        context.unanswered += 1
        context.metrics.in_flight += 1

    async def enter(self) -> None:
        """Wait for admission. Raises ApiError (429)."""
        context = self._context
        self._deadline += context.config.timeouts.answer_s
        if context.unanswered > context.queue_limit:
            context.metrics.shed[self._tenant.name, "queue_full"] += 1
            raise from_router(QueueFull("too many requests wait already"))
        if context.door.open:
            return
        completion = self._completion
        self._visit = context.door.enter(
            self, self._tenant, completion.model, completion.prompt_tokens, self._started
        )
        if self._visit.waits:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn

    def pick(self, avoid: Collection[str], session: bytes | None) -> Target:
        """Pick an instance, none of `avoid`. Raises RouterError."""
        context, completion = self._context, self._completion
        router = context.router
        self._pick = router.pick(
            completion.model,
            completion.prompt_tokens,
            completion.output_tokens,
            single=not completion.splittable or has_prefill(router, completion.model),
            avoid=avoid,
            doubt=context.breaker.doubted(context.clock()) if context.breaker.standing else (),
            session=session,
            text=find_text(completion) if router.reads_text else b"",
        )
        context.metrics.dispatches[completion.model, self._pick.reason] += 1
        return self._pick.decode

    # --- called by the admission controller and the sweeper ---

    def admit(self) -> None:
        """The admission controller lets the queued request through."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def turn_away(self, error: ApiError) -> None:
        """The admission controller refuses the queued request."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)

    def sweep(self, now: float) -> None:
        """End the accounting when no message has come for too long; the proxy has its own
        time-out."""
        if now > self._deadline:
            status = HTTPStatus.GATEWAY_TIMEOUT
            self.turn_away(fail_engine(status, "no instance could take it in time"))
            self.end("broken")

    # --- called with messages of the response ---

    def answer(self, status: int, served: str) -> None:
        """The head of the response. `served`: the endpoint it is from, empty if unknown."""
        self._status = status
        context, pick = self._context, self._pick
        if pick is None:
            return
        if served and served != name_endpoint(pick.decode):
            # Another endpoint responded: a gateway, which does its own accounting and counting.
            context.breaker.fail(pick.decode.instance, context.clock())
            context.router.release(pick)
            self._pick, self._elsewhere = None, True
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            context.breaker.fail(pick.decode.instance, context.clock())
        elif context.breaker.standing:
            context.breaker.succeed(pick.decode.instance)

    def receive(self, piece: bytes) -> None:
        """A piece of the response's body."""
        context = self._context
        if self._over:
            return
        now = context.clock()
        self._deadline = now + context.config.timeouts.answer_s
        tail = self._tail + piece
        # A match that spans two pieces is counted with the second one.
        self._events += tail.count(_EVENT_END) - self._tail.count(_EVENT_END)
        self._tail = tail[-_TAIL_BYTES:]
        if self._began is None and piece:
            self._began = now
            context.unanswered -= 1
            if self._pick is not None:
                context.router.release(self._pick, Phase.PREFILL)
            if self._visit is not None:
                context.door.observe(self._visit, now)

    def complete(self) -> None:
        """The response is complete."""
        if self._status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.end("failed")
        elif self._status >= HTTPStatus.BAD_REQUEST:
            self.end("refused")
        else:
            self.end("ok")

    def end(self, outcome: str) -> None:
        """Release the accounting and count the outcome; calls after the first do nothing."""
        context = self._context
        if self._over:
            return
        self._over = True
        context.exchanges.discard(self)
        if self._began is None:
            context.unanswered -= 1
        tokens = 0 if self._elsewhere else self._count_tokens()
        if self._pick is not None:
            if outcome == "ok" and tokens:
                context.router.learn(self._pick, tokens)
            context.router.release(self._pick)
        self._tell(outcome, tokens)
        if self._visit is not None:
            context.door.leave(self._visit, tokens, context.clock())

    def _count_tokens(self) -> int:
        """As the engine counts them, or else the number of events."""
        counts = _COUNTED.findall(self._tail)
        return int(counts[-1]) if counts else self._events

    def _tell(self, outcome: str, tokens: int) -> None:
        context, completion = self._context, self._completion
        context.metrics.in_flight -= 1
        if self._elsewhere:
            return
        stream_s = None
        if outcome == "ok" and completion.stream and self._began is not None:
            stream_s = self._began - self._started, context.clock() - self._began
        is_known = completion.model in context.router.directory.known
        count(
            context.metrics,
            completion.model if is_known else "",
            self._tenant.name,
            outcome,
            completion.prompt_tokens,
            tokens,
            stream_s,
        )


def has_prefill(router: Router, model: str) -> bool:
    """Whether requests for this model are currently split if possible."""
    entry = router.directory.models.get(model)
    return entry is not None and any(board.prefill.size for board in entry.boards)


def name_endpoint(target: Target) -> str:
    """An engine's address as proxies write it."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}"
