"""A request that a proxy sends to an instance itself: its place in the books, and what it teaches.

Made by the endpoint picker, which hears of the answer as the proxy passes it on. What is hard: the
proxy may vanish at any time, or never ask about the answer; so the entry in the books ends with the
stream, and it has a deadline besides.
"""

import asyncio
import re
from collections.abc import Collection
from http import HTTPStatus

from cleave.gateway.admission.door import Visit
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.completion import Completion, find_text
from cleave.gateway.context import Context
from cleave.gateway.counts.tally import count
from cleave.gateway.errors import ApiError, fail_engine, from_router
from cleave.router.errors import QueueFull
from cleave.router.instance import Target
from cleave.router.router import Phase, Pick, Router

_TAIL_BYTES = 1_024
"""Of an answer, where its usage is."""
_EVENT_END = b"}\n\n"
_COUNTED = re.compile(rb'"completion_tokens":\s*(\d+)')


class Direct:
    """One request. Enter, pick, tell of the answer, and end it, whatever happens."""

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
        """Wait until it may go to an instance. Raises ApiError (429)."""
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
        """The instance, none of `avoid`. Raises RouterError."""
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

    # --- what the door and the sweeper call ---

    def admit(self) -> None:
        """It is its turn."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def turn_away(self, error: ApiError) -> None:
        """It has waited in vain."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)

    def sweep(self, now: float) -> None:
        """Leave the books when nothing was heard for too long; the proxy keeps its own time."""
        if now > self._deadline:
            status = HTTPStatus.GATEWAY_TIMEOUT
            self.turn_away(fail_engine(status, "no instance could take it in time"))
            self.end("broken")

    # --- what is heard of the answer ---

    def answer(self, status: int, served: str) -> None:
        """Its head. `served`: the endpoint it is from, empty if unknown."""
        self._status = status
        context, pick = self._context, self._pick
        if pick is None:
            return
        if served and served != name_endpoint(pick.decode):
            # Another one did it after all: a gateway, which keeps its own books and counts it.
            context.breaker.fail(pick.decode.instance, context.clock())
            context.router.release(pick)
            self._pick, self._elsewhere = None, True
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            context.breaker.fail(pick.decode.instance, context.clock())
        elif context.breaker.standing:
            context.breaker.succeed(pick.decode.instance)

    def receive(self, piece: bytes) -> None:
        """Some of its body."""
        context = self._context
        if self._over:
            return
        now = context.clock()
        self._deadline = now + context.config.timeouts.answer_s
        tail = self._tail + piece
        # What is cut between two pieces is counted with the second.
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
        """The answer has come to its end."""
        if self._status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.end("failed")
        elif self._status >= HTTPStatus.BAD_REQUEST:
            self.end("refused")
        else:
            self.end("ok")

    def end(self, outcome: str) -> None:
        """Leave the books, once."""
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
        """As the engine counts them, or else the events."""
        stated = _COUNTED.findall(self._tail)
        return int(stated[-1]) if stated else self._events

    def _tell(self, outcome: str, tokens: int) -> None:
        context, completion = self._context, self._completion
        context.metrics.in_flight -= 1
        if self._elsewhere:
            return
        stream_s = None
        if outcome == "ok" and completion.stream and self._began is not None:
            stream_s = self._began - self._started, context.clock() - self._began
        known = completion.model in context.router.directory.known
        count(
            context.metrics,
            completion.model if known else "",
            self._tenant.name,
            outcome,
            completion.prompt_tokens,
            tokens,
            stream_s,
        )


def has_prefill(router: Router, model: str) -> bool:
    """Whether requests for this model are split now, if they can be."""
    known = router.directory.models.get(model)
    return known is not None and any(board.prefill.size for board in known.boards)


def name_endpoint(target: Target) -> str:
    """An engine's address as proxies name it."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}"
