"""Discovery of agents: their addresses and pods. Used by gateways, and by agents that need a peer.

A source is one string, so that it fits an environment variable in a pod:
`file:PATH` (one host:port per line, read at each call; written by the process kubelet),
`endpoints:NAMESPACE/SERVICE:PORT` (the EndpointSlices of a Service, from the API server),
`dns:NAME:PORT` (all addresses of a headless Service) or `HOST:PORT[,HOST:PORT...]`.

Gateways poll continuously; for them `AgentDiscovery` uses a watch where the source supports one.
Agents poll until they know one peer: a few lists are far less work for the API server than
a watch in every worker, each of which would receive the changes of all other workers.
"""

import asyncio
import socket
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from cleave.rpc import endpointslices
from cleave.rpc.credentials import AgentEndpoint, Credentials, Metadata, find_credentials
from cleave.rpc.endpointslices import EndpointSliceWatcher, Service
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerError, find_access
from cleave.rpc.plan_thresholds import PlanThresholds

ENV = "CLEAVE_AGENTS"
"""Environment variable with the default source."""


class DiscoveryError(ValueError):
    """The source is malformed or not usable in this process."""


class AgentSourceUnreachable(OSError):  # noqa: N818 - names the condition
    """The API server cannot be reached now."""


class AgentDiscovery:
    """The agents of a source, for callers that poll continuously, and what calls of them show."""

    def __init__(self, source: str, credentials: Credentials | None = None) -> None:
        """`credentials`: None: those of this process's environment."""
        self.source = source
        self._credentials = credentials or find_credentials()
        self._watcher: EndpointSliceWatcher | None = None
        self._task: asyncio.Task[None] | None = None

    async def list_addresses(self) -> frozenset[str]:
        """Addresses (host:port) known now; the first call starts a watch if possible.
        Raises DiscoveryError on a malformed source, OSError when it cannot be read."""
        if not self.source.startswith("endpoints:"):
            return frozenset(each.address for each in await list_agents(self.source))
        if self._watcher is None or self._task is None:
            self._watcher = EndpointSliceWatcher(_parse_service(self.source.partition(":")[2]))
            _check_access()
            self._task = asyncio.create_task(self._watcher.run())
        elif self._task.done():
            self._task.result()
        return frozenset(self._watcher.endpoints)

    @property
    def thresholds(self) -> PlanThresholds:
        """The plan's, as far as known now; none: the source has none."""
        return self._watcher.thresholds if self._watcher is not None else PlanThresholds()

    def find_agent(self, address: str) -> AgentEndpoint:
        """The agent at an address, with the pod that it has now if the source knows pods."""
        known = self._watcher.endpoints if self._watcher is not None else {}
        return known.get(address) or AgentEndpoint(address)

    async def build_metadata(self, address: str) -> Metadata:
        """What a call of the agent at an address shows; worth nothing to any other agent."""
        return await self._credentials.build_metadata(self.find_agent(address))

    async def renew_credentials(self) -> None:
        """Renew what expires soon; it costs nothing when it is not due."""
        await self._credentials.renew()

    async def close(self) -> None:
        """Stop the watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


async def find_agent(source: str, address: str) -> AgentEndpoint:
    """The agent, or the launcher, at an `address` whose host name begins with the name of its pod
    where `source` knows pods. Raises DiscoveryError, AgentSourceUnreachable, also if the pod is not
    listed yet."""
    if not source.startswith("endpoints:"):
        return AgentEndpoint(address)
    host, port = _split_address(address)
    pod = host.partition(".")[0]
    for each in await list_agents(source):
        if each.pod == pod:
            return replace(each, address=f"{each.address.rpartition(':')[0]}:{port}")
    raise AgentSourceUnreachable(f"{source} lists no pod {pod}")


async def list_agents(source: str) -> frozenset[AgentEndpoint]:
    """Present agents of `source`.
    A missing file and an unknown DNS name mean "none yet". Raises DiscoveryError on a malformed
    source, AgentSourceUnreachable when the API server cannot be reached."""
    kind, _, rest = source.partition(":")
    if kind == "file":
        return _read_file(Path(rest))
    if kind == "endpoints":
        return await _list_service_endpoints(_parse_service(rest))
    if kind == "dns":
        return await _resolve(rest)
    return _parse_agents(source.replace(",", " "))


async def _list_service_endpoints(service: Service) -> frozenset[AgentEndpoint]:
    _check_access()
    try:
        return frozenset((await endpointslices.list_endpoints(service)).values())
    except (AccessError, ApiServerError, HttpError) as error:
        raise AgentSourceUnreachable(str(error)) from None


def _parse_service(text: str) -> Service:
    """Parse NAMESPACE/SERVICE:PORT. Raises DiscoveryError."""
    path, port = _split_address(text)
    namespace, _, name = path.partition("/")
    if not namespace or not name or "/" in name:
        raise DiscoveryError(f"{text!r} is not NAMESPACE/SERVICE:PORT")
    return Service(namespace, name, port)


def _check_access() -> None:
    """Raises DiscoveryError when no access to an API server is configured."""
    try:
        find_access()
    except AccessError as error:
        raise DiscoveryError(str(error)) from None


def _read_file(path: Path) -> frozenset[AgentEndpoint]:
    try:
        return _parse_agents(path.read_text())
    except FileNotFoundError:
        return frozenset()


async def _resolve(name_and_port: str) -> frozenset[AgentEndpoint]:
    name, port = _split_address(name_and_port)
    try:
        results = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return frozenset()
    return frozenset(
        AgentEndpoint(f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}")
        for family, _, _, _, (host, *_) in results
    )


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise DiscoveryError(f"address of an agent: {address!r} is not HOST:PORT")
    return host, int(port)


@lru_cache(maxsize=4)
def _parse_agents(text: str) -> frozenset[AgentEndpoint]:
    """The addresses in a text, mostly the one of half a second ago: 1,024 take 5 ms."""
    addresses = text.split()
    for address in addresses:
        _split_address(address)
    return frozenset(map(AgentEndpoint, addresses))
