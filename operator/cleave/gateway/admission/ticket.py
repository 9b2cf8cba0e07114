"""A request in admission control, from its start to its end. Used by controller and queues."""

from typing import Protocol

from cleave.gateway.admission.fair_queue import FairQueue, QueueEntry
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.http.errors import GatewayError


class Waiter(Protocol):
    """A request that needs admission."""

    def admit(self) -> None:
        """Called when a queued request may go on."""

    def reject(self, error: GatewayError) -> None:
        """Called when a queued request is refused."""

    def fail(self) -> None:
        """Called after a fault of this program in one of these."""


class AdmissionTicket:
    """A request that was admitted or is queued, until `AdmissionController.release`."""

    __slots__ = (
        "admitted_at", "arrived_at", "backlog_tokens", "charged_tokens", "is_flex", "model",
        "prompt_tokens", "queue_entry", "tenant",
    )  # fmt: skip

    def __init__(
        self, tenant: Tenant, model: str, prompt_tokens: int, now: float, is_flex: bool = False
    ) -> None:
        self.tenant = tenant
        self.model = model
        self.prompt_tokens = prompt_tokens
        """Estimated."""
        self.charged_tokens = prompt_tokens
        """Of its prompt and output, charged to its tenant so far."""
        self.arrived_at = self.admitted_at = now
        self.is_flex = is_flex
        """Whether it only fills idle capacity."""
        self.backlog_tokens = 0.0
        """Prompt tokens queued before it at the instance with the shortest queue."""
        self.queue_entry: QueueEntry[tuple[Waiter, AdmissionTicket]] | None = None
        """Its entry in the queue; None: it was admitted at once."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is still queued."""
        return self.queue_entry is not None and self.queue_entry.item is not None


TicketQueue = FairQueue[tuple[Waiter, AdmissionTicket]]
