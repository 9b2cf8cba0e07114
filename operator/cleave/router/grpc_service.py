"""The Router service over gRPC, for gateways other than Cleave's own.

Started by the gateway if a port is configured. Its callers send the requests to engines themselves,
so picks contain the keys of engines, and the port serves only callers with a certificate. What is
hard: a caller may die between Pick and Release, so every ticket has a lease, and the number of open
tickets is limited.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from cleave.router.errors import NoInstance, QueueFull, RouterError, UnknownModel
from cleave.router.instance import RoutedInstance, Target
from cleave.router.router import Pick as RoutedPick
from cleave.router.router import RequestPhase, Router
from cleave.rpc.channel import SERVER_OPTIONS
from cleave.rpc.v1 import agent_pb2, router_pb2, router_pb2_grpc

DEFAULT_LEASE_S = 600.0
MAX_LEASE_S = 3_600.0
MAX_TICKETS = 65_536
EXPIRY_PERIOD_S = 1.0
STOP_GRACE_S = 1.0
_MAX_TOKENS = 1 << 63
"""Agents may report any number, and the message has 64 bits."""

_PHASES = {
    router_pb2.PHASE_UNSPECIFIED: RequestPhase.ALL,
    router_pb2.PHASE_PREFILL: RequestPhase.PREFILL,
    router_pb2.PHASE_DECODE: RequestPhase.DECODE,
}
_STATUS_CODES = {
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    NoInstance: grpc.StatusCode.UNAVAILABLE,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(slots=True)
class _TicketLease:
    pick: RoutedPick
    ends_at: float


class RouterService(router_pb2_grpc.RouterServicer):
    """The gRPC methods; each pick of the router gets a ticket with a lease."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._router = router
        self._clock = clock
        self._leases: dict[int, _TicketLease] = {}
        # A random start: a ticket from before a restart must not release a new pick.
        self._tickets = itertools.count(random.getrandbits(62))

    async def Pick(  # noqa: N802
        self, request: router_pb2.PickRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> router_pb2.PickResponse:
        """Select instances for a request."""
        try:
            pick = self._pick(request)
        except RouterError as error:
            await context.abort(_STATUS_CODES[type(error)], str(error))
        ticket = next(self._tickets)
        lease_s = min(request.lease_ms / 1_000 or DEFAULT_LEASE_S, MAX_LEASE_S)
        self._leases[ticket] = _TicketLease(pick, self._clock() + lease_s)
        return router_pb2.PickResponse(
            ticket=ticket,
            prefill=_to_message(pick.prefill) if pick.prefill is not None else None,
            decode=_to_message(pick.decode),
            reason=pick.reason,
            engine_model=pick.engine_model,
        )

    async def Release(  # noqa: N802
        self, request: router_pb2.ReleaseRequest, context: object
    ) -> router_pb2.ReleaseResponse:
        """Release the load of a ticket or of one phase; unknown tickets are ignored."""
        del context
        phase = _PHASES.get(request.phase, RequestPhase.ALL)
        lease = self._leases.get(request.ticket)
        if lease is not None:
            self._router.release(lease.pick, phase)
            if not lease.pick.is_open:
                del self._leases[request.ticket]
        return router_pb2.ReleaseResponse()

    async def Fleet(  # noqa: N802
        self, request: router_pb2.FleetRequest, context: object
    ) -> router_pb2.FleetSnapshot:
        """A snapshot of all instances that the router knows."""
        del context
        now = self._clock()
        return router_pb2.FleetSnapshot(
            instances=[
                _describe_instance(instance, now)
                for _, instance in sorted(self._router.registry.instances.items())
                if _serves_model(instance, request.model)
            ]
        )

    def expire(self, now: float) -> None:
        """Release every ticket whose lease has expired."""
        for ticket, lease in tuple(self._leases.items()):
            if now >= lease.ends_at:
                del self._leases[ticket]
                self._router.release(lease.pick)

    def _pick(self, request: router_pb2.PickRequest) -> RoutedPick:
        if len(self._leases) >= MAX_TICKETS:
            raise QueueFull(f"{MAX_TICKETS} tickets are open already")
        return self._router.pick(
            request.model,
            request.prompt_tokens,
            request.output_tokens,
            colocated=request.single_instance,
            excluded=frozenset(request.avoid),
            prefill_lost=any(map(self._was_prefill, request.avoid)),
        )

    def _was_prefill(self, name: str) -> bool:
        """Whether a failed instance had the prefill role; an unknown one counts as such."""
        instance = self._router.registry.instances.get(name)
        return instance is None or instance.registration.role == agent_pb2.ROLE_PREFILL


class RouterServer:
    """Serves the gRPC methods on a port and expires leases periodically."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._service = RouterService(router, clock)
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._expiry_task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
        """Listen; returns the port. Raises OSError."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        router_pb2_grpc.add_RouterServicer_to_server(self._service, self._server)
        try:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        self._expiry_task = asyncio.create_task(self._expire_leases())
        return port

    async def stop(self) -> None:
        """Close the port."""
        if self._expiry_task is not None:
            self._expiry_task.cancel()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            # Not from here: a fault would end this task, and no lease after it.
            asyncio.get_running_loop().call_soon(self._service.expire, self._clock())


def _to_message(target: Target) -> router_pb2.Target:
    return router_pb2.Target(
        instance=target.instance,
        engine_url=target.engine_url,
        boot_id=target.boot_id,
        epoch=target.epoch,
        engine_key=target.engine_key,
    )


def _serves_model(instance: RoutedInstance, model: str) -> bool:
    registration = instance.registration
    adapters = [*registration.adapters, *(each.name for each in registration.runtime_adapters)]
    return model in ("", registration.model) or model in adapters


def _describe_instance(instance: RoutedInstance, now: float) -> router_pb2.Instance:
    in_flight = instance.in_flight
    pending = in_flight.prompt.pending + in_flight.resident.pending
    registration = agent_pb2.Registration()
    registration.CopyFrom(instance.registration)
    # Callers get the keys of the engines that are picked for them.
    registration.ClearField("engine_key")
    # Kilobytes, which a response with a thousand instances has no room for.
    registration.ClearField("model_report")
    return router_pb2.Instance(
        registration=registration,
        load=instance.load,
        pending_tokens=int(min(max(pending, 0.0), _MAX_TOKENS)),
        requests_in_flight=in_flight.count_requests(),
        report_age_ms=int(max(now - instance.last_event_at, 0.0) * 1_000),
        selectable=instance.selectable,
        agent=instance.agent,
    )
