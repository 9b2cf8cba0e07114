"""Where the agents are. Used by the gateway's fleet and by agents that look for a peer.

A source is one string, so that it fits an environment variable in a pod:
`file:PATH` (one host:port a line, read anew at each call; the process kubelet writes it),
`dns:NAME:PORT` (all addresses of a headless Service) or `HOST:PORT[,HOST:PORT...]`.
"""

import asyncio
import socket
from pathlib import Path

ENV = "CLEAVE_AGENTS"
"""Environment variable with the default source."""


class DiscoveryError(ValueError):
    """The source cannot be understood."""


async def find_agents(source: str) -> frozenset[str]:
    """Addresses (host:port) of the agents that `source` names now.

    An absent file and an unknown name mean "none yet". Raises DiscoveryError on a malformed source.
    """
    kind, _, rest = source.partition(":")
    if kind == "file":
        return _read(Path(rest))
    if kind == "dns":
        return await _resolve(rest)
    return frozenset(_checked(address.strip()) for address in source.split(",") if address.strip())


def _read(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text().split()
    except FileNotFoundError:
        return frozenset()
    return frozenset(_checked(line) for line in lines)


async def _resolve(name_and_port: str) -> frozenset[str]:
    name, port = _split(name_and_port)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return frozenset()
    return frozenset(
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise DiscoveryError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def _checked(address: str) -> str:
    _split(address)
    return address
