"""Pages that grow with the fleet: built in time slices, once for all who request them meanwhile.

Used by the handlers. What is hard: a page must contain what had happened before it was requested.
So a client that comes while a page is being built gets the next one, with all others that do; any
number of clients causes one build at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cleave.gateway.event_loop_faults import contain
from cleave.time_slices import SliceQueue, Steps


@dataclass(frozen=True, slots=True)
class BuiltPage:
    """A response without its head."""

    status: int
    fields: bytes
    """Header lines."""
    body: list[bytes]
    """In pieces."""


class PageRequest:
    """A client that waits for a page."""

    def __init__(self, respond: Callable[[BuiltPage], None], drop: Callable[[], None]) -> None:
        """`respond`: sends a page to the client; `drop`: closes its connection at once."""
        self._respond = respond
        self._drop = drop
        self._is_cancelled = False

    def respond(self, page: BuiltPage) -> None:
        """Send the page to the client, unless it has disconnected."""
        if not self._is_cancelled:
            self._respond(page)

    def drop(self) -> None:
        """The page cannot be built."""
        if not self._is_cancelled:
            self._drop()

    def cancel(self) -> None:
        """The client has disconnected."""
        self._is_cancelled = True

    def set_paused(self, blocked: bool) -> None:
        """Nothing to do: the connection sends the page as the client takes it."""


class SharedPage:
    """One page."""

    def __init__(self, queue: SliceQueue, build: Callable[[], Steps[BuiltPage]]) -> None:
        """`queue`: in which the page is built."""
        self._queue = queue
        self._build = build
        self._waiting: list[PageRequest] = []
        self._is_building = False

    def request(self, request: PageRequest) -> None:
        """Respond with a page that is built from now on; at once if that takes no time."""
        self._waiting.append(request)
        if not self._is_building:
            self._queue.start(self._build_in_turn())

    def _build_in_turn(self) -> Steps[None]:
        """Build for those who wait, and again for those who have come meanwhile."""
        self._is_building = True
        try:
            while self._waiting:
                requests, self._waiting = self._waiting, []
                try:
                    page = yield from self._build()
                except BaseException:
                    for each in requests:
                        each.drop()
                    raise
                for each in requests:
                    contain(each.drop, each.respond, page)
                    yield
        finally:
            self._is_building = False
