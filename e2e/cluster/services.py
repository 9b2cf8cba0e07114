"""Services of a test cluster: connections to a ClusterIP go on to a ready endpoint.

Stands in for kube-proxy, in user space. As with the real one, a terminating endpoint gets new
connections only while no other is ready, and an endpoint that refuses is the client's to see.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from e2e.cluster.client import Client, Manifest

_SERVICES = "/api/v1/services"
_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
_CONNECT_TIMEOUT_S = 5
_Key = tuple[str, str]


class Forwarder:
    """Listens on the ClusterIPs of all Services; an async context manager."""

    def __init__(self, api: Client) -> None:
        self._api = api
        self._slices: dict[_Key, Manifest] = {}
        self._servers: dict[_Key, dict[int, asyncio.Server | None]] = {}
        """By port; None: it is being opened."""
        self._opening: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for key in list(self._servers):
            self._close(key)

    def tasks(self) -> list[asyncio.Task[None]]:
        """What keeps it going."""
        return [
            asyncio.create_task(self._api.follow(_SERVICES, self._services, self._service)),
            asyncio.create_task(self._api.follow(_SLICES, self._all_slices, self._slice)),
        ]

    def _services(self, services: list[Manifest]) -> None:
        for key in self._servers.keys() - {_key(service) for service in services}:
            self._close(key)
        for service in services:
            self._open(service)

    def _service(self, event: Manifest) -> None:
        if event["type"] == "DELETED":
            self._close(_key(event["object"]))
        else:
            self._open(event["object"])

    def _all_slices(self, slices: list[Manifest]) -> None:
        self._slices = {_key(found): found for found in slices}

    def _slice(self, event: Manifest) -> None:
        found = event["object"]
        if event["type"] == "DELETED":
            self._slices.pop(_key(found), None)
        else:
            self._slices[_key(found)] = found

    def _open(self, service: Manifest) -> None:
        address = service["spec"].get("clusterIP")
        if address in (None, "", "None"):
            return
        servers = self._servers.setdefault(_key(service), {})
        for port in service["spec"].get("ports") or []:
            if port["port"] in servers:
                continue
            servers[port["port"]] = None
            task = asyncio.create_task(self._listen(_key(service), address, port))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _listen(self, service: _Key, address: str, port: Manifest) -> None:
        name = port.get("name", "")
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Client(lambda: self._endpoint(service, name)), address, port["port"]
        )
        if service in self._servers:
            self._servers[service][port["port"]] = server
        else:
            server.close()

    def _close(self, service: _Key) -> None:
        for server in self._servers.pop(service, {}).values():
            if server is not None:
                server.close()

    def _endpoint(self, service: _Key, port_name: str) -> tuple[str, int] | None:
        """Where the next connection goes."""
        slices = [
            found
            for found in self._slices.values()
            if (found["metadata"]["namespace"], _service_of(found)) == service
        ]
        chosen = endpoints(slices, port_name)
        return random.choice(chosen) if chosen else None


def endpoints(slices: list[Manifest], port_name: str) -> list[tuple[str, int]]:
    """Addresses that get new connections: the ready ones, else those that terminate but serve."""
    ready, terminating = [], []
    for found in slices:
        ports = [p["port"] for p in found.get("ports") or [] if p.get("name", "") == port_name]
        for endpoint in found.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            destinations = [(endpoint["addresses"][0], port) for port in ports]
            if conditions.get("ready", True):
                ready += destinations
            elif conditions.get("serving") and conditions.get("terminating"):
                terminating += destinations
    return ready or terminating


def _key(manifest: Manifest) -> _Key:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _service_of(found: Manifest) -> str:
    return str((found["metadata"].get("labels") or {}).get("kubernetes.io/service-name", ""))


class _Half(asyncio.Protocol):
    """One end of a forwarded connection; bytes go to `other`, at the pace it takes them."""

    transport: Any = None
    other: "_Half | None" = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other is not None and self.other.transport.can_write_eof():
            with contextlib.suppress(OSError):
                self.other.transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.abort() if error else self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()


class _Client(_Half):
    """The end of who connected to a Service."""

    def __init__(self, endpoint: Callable[[], tuple[str, int] | None]) -> None:
        self._endpoint = endpoint

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._task = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        endpoint = self._endpoint()
        try:
            if endpoint is None:
                raise ConnectionRefusedError
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, server = await loop.create_connection(_Half, *endpoint)
        except (OSError, TimeoutError):
            self.transport.abort()
            return
        if self.transport.is_closing():
            server.transport.abort()
            return
        self.other, server.other = server, self
        self.transport.resume_reading()
