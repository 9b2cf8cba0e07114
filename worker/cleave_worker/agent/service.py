"""The agent's gRPC service (watch, roles, adapters, drain, health); the health protocol.

Called by gateways, other agents, kubelets and `cleave status`. A hundred watchers may stream from
one agent. So a report is one message built from a few numbers, and a change of the registration is
sent at once instead of with the next report.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from cleave.policy.adapters import AdapterSource
from cleave.policy.queue_model import INTERVAL_MS, choose_report_interval_ms
from cleave.rpc.kube_api import AccessError
from cleave.rpc.probes import OPTIONS, Probes
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent.authentication import (
    AuthenticationInterceptor,
    Authenticator,
    TokenSignatures,
)
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.drain import DrainResult
from cleave_worker.agent.instance import (
    AdaptersRefused,
    BootMismatch,
    EpochLeap,
    StaleAdapters,
    StaleEpoch,
    WorkerInstance,
)
from cleave_worker.agent.kv_self_test import KvTestError
from cleave_worker.scheduling.config import ROLES

_log = logging.getLogger(__name__)

READY_SERVICE = "ready"
"""Service name under which the health protocol reports whether the instance takes requests."""
_INTERVALS_MS = 50, 60_000
"""Bounds on the report interval that a watcher may request."""
_MAX_WATCHERS = 512
"""Concurrent streams: at the shortest interval about a core's worth of reports."""
_MAX_ROUTER_NAME_CHARACTERS = 64
"""Characters; gateways use names of 32."""
_MAX_PROOFS = 256
"""Results of pairs in one call."""
_MAX_PROOF_CHARACTERS = 256
"""Characters of each text in a result."""

_Context = grpc.aio.ServicerContext[object, object]
DrainCall = Callable[[float | None], Awaitable[DrainResult]]
"""Drains within some seconds (None: the agent's own time-out)."""
VerifyRoleCall = Callable[["agent_pb2.Role.ValueType"], Awaitable[None]]
"""Verifies the KV path of a role, unless it is verified. Raises KvTestError."""


class AgentService(agent_pb2_grpc.AgentServicer):
    """The gRPC methods for one instance."""

    def __init__(
        self, instance: WorkerInstance, drain: DrainCall, verify_role: VerifyRoleCall
    ) -> None:
        self._instance = instance
        self._drain = drain
        self._verify_role = verify_role
        self._routers: Counter[str] = Counter()

    async def Watch(  # noqa: N802
        self, request: agent_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[agent_pb2.WatchEvent]:
        """Stream a registration first and after each change, and load reports in between."""
        if len(request.router) > _MAX_ROUTER_NAME_CHARACTERS:
            length = f"{len(request.router)} characters, above {_MAX_ROUTER_NAME_CHARACTERS}"
            fault = f"router is a name of {length}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        if self._routers.total() >= _MAX_WATCHERS:
            fault = f"{_MAX_WATCHERS} watchers are connected already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, fault)
        shortest_ms, longest_ms = _INTERVALS_MS
        requested_ms = min(max(request.interval_ms or INTERVAL_MS, shortest_ms), longest_ms)
        version, pairs_version = None, 0
        self._routers[request.router] += 1
        try:
            while not self._instance.ended:
                if version != self._instance.version:
                    version = self._instance.version
                    yield agent_pb2.WatchEvent(registration=self._instance.copy_registration())
                if pairs_version != self._instance.pairs_version:
                    pairs_version = self._instance.pairs_version
                    yield agent_pb2.WatchEvent(pairs=self._instance.build_pair_proofs())
                load = self._build_report(request.router)
                yield agent_pb2.WatchEvent(load=load)
                if (version, pairs_version) == self._instance.versions:
                    interval_ms = choose_report_interval_ms(requested_ms, load.num_routers)
                    await self._instance.wait_for_change(interval_ms / 1000)
        finally:
            self._routers[request.router] -= 1
            # Removes names with a count of zero.
            self._routers += Counter()

    def _build_report(self, router: str) -> agent_pb2.LoadReport:
        """Build a load report with the router's rank among the routers that send requests."""
        load = self._instance.build_load_report()
        if router:
            routers = sorted(name for name in self._routers if name)
            load.num_routers, load.router_rank = len(routers), routers.index(router)
        return load

    async def SetRole(  # noqa: N802
        self, request: agent_pb2.SetRoleRequest, context: _Context
    ) -> agent_pb2.SetRoleResponse:
        """Change the role once its KV path is verified; every watcher receives it at once."""
        if request.role not in ROLES.values():
            roles = ", ".join(f"{name} ({role})" for name, role in ROLES.items())
            fault = f"role {request.role} must be one of {roles}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        try:
            self._instance.check_role_change(request.epoch, request.boot_id)
            await self._verify_role(request.role)
            self._instance.set_role(
                request.role, request.epoch, request.boot_id, lasting=request.lasting
            )
        except BootMismatch as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except EpochLeap as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StaleEpoch as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except KvTestError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"KV path not verified: {error}")
        return agent_pb2.SetRoleResponse(
            role=request.role, epoch=request.epoch, num_running=self._instance.load.num_running
        )

    async def RecordPairs(  # noqa: N802
        self, request: agent_pb2.PairProofs, context: _Context
    ) -> agent_pb2.RecordPairsResponse:
        """Keep results of pairs with this decode engine; every watcher receives them at once."""
        texts = [text for each in request.proofs for text in (each.prefill, each.reason)]
        texts += [each.prefill_boot_id for each in request.proofs]
        longest = max(map(len, texts), default=0)
        if len(request.proofs) > _MAX_PROOFS or longest > _MAX_PROOF_CHARACTERS:
            fault = (
                f"{len(request.proofs)} proofs, the longest text has {longest} characters: "
                f"at most {_MAX_PROOFS} and {_MAX_PROOF_CHARACTERS}"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        try:
            self._instance.record_pairs(request.boot_id, request.proofs)
        except BootMismatch as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        return agent_pb2.RecordPairsResponse()

    async def SetAdapters(  # noqa: N802
        self, request: agent_pb2.SetAdaptersRequest, context: _Context
    ) -> agent_pb2.SetAdaptersResponse:
        """Take an order of LoRA adapters; the registration reports how it is followed."""
        ordered = [AdapterSource(each.name, each.source) for each in request.adapters]
        try:
            self._instance.order_adapters(ordered, request.generation)
        except StaleAdapters as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except AdaptersRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return agent_pb2.SetAdaptersResponse()

    async def Drain(  # noqa: N802
        self,
        request: agent_pb2.DrainRequest,
        context: _Context,  # noqa: ARG002
    ) -> agent_pb2.DrainResponse:
        """Wait until the engine is empty; the agent ends after the response."""
        drained = await self._drain(request.timeout_ms / 1000 if request.timeout_ms else None)
        return agent_pb2.DrainResponse(empty=drained.is_empty, num_left=drained.num_remaining)

    async def Health(  # noqa: N802
        self,
        request: agent_pb2.HealthRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> agent_pb2.HealthResponse:
        """Return what Watch would send now."""
        instance = self._instance
        return agent_pb2.HealthResponse(
            registration=instance.copy_registration(),
            load=instance.build_load_report(),
            pairs=instance.build_pair_proofs(),
        )


class AgentServer:
    """The service on its port, until it is stopped."""

    def __init__(
        self,
        instance: WorkerInstance,
        drain: DrainCall,
        verify_role: VerifyRoleCall,
        address: str,
        authenticator: Authenticator | None = None,
    ) -> None:
        """`authenticator`: of callers; None: all are accepted."""
        self._instance = instance
        self._address = address
        interceptors = [AuthenticationInterceptor(authenticator)] if authenticator else []
        # With SO_REUSEPORT two agents could share a port without an error.
        options = [("grpc.so_reuseport", 0), *OPTIONS]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._probes = Probes()
        self._health_task: asyncio.Task[None] | None = None
        service = AgentService(instance, drain, verify_role)
        agent_pb2_grpc.add_AgentServicer_to_server(service, self._server)
        self._probes.add_to(self._server)

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken."""
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}") from error
        self._probes.set("", is_serving=True)
        self._probes.set(READY_SERVICE, is_serving=False)
        await self._server.start()
        self._health_task = asyncio.create_task(self._publish_health())

    async def stop(self, seconds: float) -> None:
        """Stop; running calls have `seconds` to finish."""
        if self._health_task:
            self._health_task.cancel()
        await self._server.stop(seconds)

    async def _publish_health(self) -> None:
        while True:
            version = self._instance.version
            ready = self._instance.state == agent_pb2.STATE_READY
            self._probes.set(READY_SERVICE, is_serving=ready)
            if version == self._instance.version:
                await self._instance.wait_for_change()


def make_authenticator(config: AgentConfig, instance: str, address: str) -> Authenticator | None:
    """The authenticator of an agent of `instance` at `address`, or of the launcher of its ranks;
    None: it accepts all callers. Raises OSError when the token, or in a cluster the pod's token for
    the API server, cannot be read."""
    if config.trusted_accounts:
        # Only in clusters: an installation without the extra `worker` has no library for it.
        from cleave.rpc.account_identity import read_own_pod
        from cleave_worker.agent.account_signatures import AccountSignatures

        accounts, peers = config.trusted_accounts, config.peer_accounts
        try:
            return AccountSignatures(accounts, peers, instance, read_own_pod().uid)
        except AccessError as error:
            raise OSError(f"callers cannot be verified: {error}") from None
    if config.token_file is not None:
        return TokenSignatures(config.token_file, address)
    return None
