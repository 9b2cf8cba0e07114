"""One instance as the router sees it: what its agent stated, what it carries, whether it is open.

Used by the directory (which changes it) and the board (which scores it). What is hard: books belong
to one boot of an engine. After a restart the old requests are gone with the old engine, yet their
tickets are still to be released; so books are replaced, never reset, and late releases hit the old.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from cleave.policy.books import Book, Queue, estimate_pending
from cleave.rpc.names import name_of
from cleave.rpc.v1 import agent_pb2

ROLES = (agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED)
"""Those that this version places requests by, in the order of the pool policy's numbers; an agent
of a newer one may state others."""
STILL_NS = 10_000_000_000
"""A lease of KV lasts for two thirds of 30 s after a heartbeat, and these come each 5 s."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a picked phase runs; does not change when the instance does."""

    instance: str
    host: str
    port: int
    engine_url: str
    boot_id: str
    epoch: int
    role: str = ""
    """prefill, decode or mixed: what it served when it was picked."""
    kv_port: int = 0
    """Where KV can be followed while it is computed: rank 0's; 0: nowhere."""
    ahead_from_tokens: int = 0
    """Prompts from so many on are worth following; 0: the plan knows which."""


class Contact(enum.Enum):
    """How well an instance's agent is heard."""

    HEARD = "heard"
    STALE = "stale"
    """Connected, no report for a while: takes requests that no other instance can."""
    SILENT = "silent"
    """Connected, no report for so long that it takes none."""
    LOST = "connection lost"
    """Takes none either."""


class Entry(Protocol):
    """A request that decodes at an instance, or will."""

    prompt_tokens: int
    output_tokens: float
    """Predicted."""
    decoding_since: float | None
    """Seconds of the router's clock; None: its prompt is not computed yet."""


class Ledger:
    """What this router has sent to one boot of an engine."""

    __slots__ = (
        "context",
        "heavy",
        "last_turn",
        "others",
        "prompt",
        "prompts",
        "queue",
        "requests",
        "resident",
        "running",
    )

    def __init__(self) -> None:
        self.prompt = Book()
        """Prompt tokens that are not computed yet."""
        self.queue = Queue()
        """How they get on."""
        self.resident = Book()
        """Tokens that hold KV blocks of requests being decoded."""
        self.prompts = 0
        """Requests that these are of."""
        self.requests = 0
        self.others = 0.0
        """Requests of other gateways, when the last report was taken."""
        self.heavy = 0
        """Decoding requests with long outputs."""
        self.context = 0.0
        """Tokens of decoding requests, as Aladdin weighs them."""
        self.running: dict[Entry, None] = {}
        """Requests that decode there, or will."""
        self.last_turn = 0
        """The pick that last sent something there."""

    def count_pending(self, prompts: bool = True) -> tuple[float, float, float]:
        """(prompt tokens that wait, prompts these are of, tokens that hold blocks); the second is 0
        unless `prompts` are asked for."""
        prompt = self.prompt.pending
        count = self.count_prompts(prompt) if prompts and prompt else 0.0
        return prompt, count, self.resident.pending

    def count_requests(self) -> int:
        """What is running there of those that keep these books."""
        return self.requests

    def count_prompts(self, pending: float) -> float:
        """Of all tokens that wait; prompts of other gateways are taken to be as long as usual."""
        others = pending - self.prompt.own
        return self.prompts + self.queue.count_prompts(others) if others else self.prompts

    def report_requests(self, here: int) -> None:
        """The instance's own count arrived."""
        self.others = estimate_pending(0.0, here, self.count_requests())

    def tell(self) -> None:
        """Tell others what has changed that keep the same books."""

    def sync(self) -> None:
        """Tell, and hear what they have told."""

    def leave(self) -> None:
        """The boot is gone, or not followed any more."""


class Scoreboard:
    """What an instance is scored on. No protocol: compiled, those take three times as long."""

    __slots__ = ()

    def update(self, slot: int) -> None:
        """Score one instance anew from its books."""
        raise NotImplementedError


class Instance:
    """An instance and the newest that is known about it."""

    __slots__ = (
        "_open_ledger",
        "agent",
        "board",
        "contact",
        "heard_at",
        "ledger",
        "load",
        "name",
        "num_routers",
        "registration",
        "router_rank",
        "slot",
        "stood_still_at",
        "target",
    )

    def __init__(
        self,
        agent: str,
        registration: agent_pb2.Registration,
        now: float,
        open_ledger: Callable[[str, str], Ledger] = lambda name, boot_id: Ledger(),  # noqa: ARG005
    ) -> None:
        """`open_ledger`: for a boot of an instance, by the names of both.

        Raises ValueError when the engine's URL is none.
        """
        self.target = to_target(registration)
        self.name = registration.instance
        """Unique in the fleet."""
        self.agent = agent
        self.registration = registration
        self.load = agent_pb2.LoadReport()
        self._open_ledger = open_ledger
        self.ledger = open_ledger(self.name, registration.boot_id)
        self.board: Scoreboard | None = None
        """Where it is scored; None once it has been forgotten."""
        self.slot = 0
        self.contact = Contact.HEARD
        self.heard_at = now
        """Seconds of the clock that the directory is given."""
        self.stood_still_at = -math.inf
        """The same clock, when its engine was last seen to go on after it had made no step with
        requests for so long that leases of KV may have ended."""
        self.num_routers = 1
        """That send requests there."""
        self.router_rank = 0
        """Of this one among them."""

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether a prompt's KV finds free blocks there at once, as the last report tells."""
        free = self.load.kv_blocks_free * self.registration.kv_block_size
        return free >= prompt_tokens

    @property
    def selectable(self) -> bool:
        """Whether new requests may be sent there; what is ready has a boot and an address."""
        return (
            self.contact in (Contact.HEARD, Contact.STALE)
            and self.registration.state == agent_pb2.STATE_READY
            and self.registration.role in ROLES
            and bool(self.target.boot_id and self.target.port)
        )

    def register(self, agent: str, registration: agent_pb2.Registration) -> None:
        """Take over a new statement; a new boot starts with empty books.

        Raises ValueError when the engine's URL is none; nothing of it is taken over then.
        """
        target = to_target(registration)
        if registration.boot_id != self.registration.boot_id:
            self.ledger.leave()
            self.ledger = self._open_ledger(self.name, registration.boot_id)
            self.load = agent_pb2.LoadReport()
        self.agent = agent
        self.registration = registration
        self.target = target

    def report(self, load: agent_pb2.LoadReport, now: float) -> bool:
        """Take over a load report; False when it is of another boot."""
        if load.boot_id != self.registration.boot_id:
            return False
        before = self.load
        if load.sampled_ns - before.sampled_ns > STILL_NS and (
            before.num_running or before.num_waiting
        ):
            self.stood_still_at = now
        self.load = load
        self.num_routers, self.router_rank = max(load.num_routers, 1), load.router_rank
        if self.ledger.prompt.report(load.pending_prompt_tokens) < 0.5:
            # What waits there others have sent, and only they know when its first prompt began.
            self.ledger.queue.since_ms = now * 1000
        self.ledger.resident.report(count_resident_tokens(self.registration, load))
        here = load.num_running + load.num_waiting
        self.ledger.report_requests(here)
        return True


def count_resident_tokens(
    registration: agent_pb2.Registration, load: agent_pb2.LoadReport
) -> float:
    """Tokens whose KV an engine holds."""
    blocks = max(registration.kv_blocks_total - load.kv_blocks_free, 0)
    return float(blocks * registration.kv_block_size)


def to_target(registration: agent_pb2.Registration) -> Target:
    """The address of an engine; port 0 when its URL is not known yet.

    Raises ValueError when the URL is none.
    """
    parts = urlsplit(registration.engine_url)
    return Target(
        instance=registration.instance,
        host=parts.hostname or "",
        port=parts.port or 0,
        engine_url=registration.engine_url,
        boot_id=registration.boot_id,
        epoch=registration.epoch,
        role=name_of(agent_pb2.Role, registration.role),
        kv_port=registration.kv_port,
        ahead_from_tokens=registration.ahead_from_tokens,
    )
