"""Loopback addresses for pods: one per pod, so that pods can use the same ports as in Kubernetes.

Called by the kubelet. Linux answers on all of 127.0.0.0/8. A deployment takes a block of 254
addresses from 127.64.0.0/10, chosen by its name so that addresses stay the same between runs.
Another kubelet, or pods that still drain after their kubelet died, may use the block. A socket
bound to the last address of a block is its lock, and a pod's ports are tested before an address is
allocated.
"""

import contextlib
import hashlib
import socket
from collections.abc import Iterable

HOST_IP = "127.0.0.1"
_LOCK_PORT = 10250
"""The kubelet's own port in Kubernetes."""
_BLOCKS = 64 * 256
_BLOCK_ATTEMPTS = 32
_INTERNAL_PORT_OFFSET = 10_000
_INTERNAL_ATTEMPTS = 100
_MAX_PORT = 65_535


class AddressShortageError(RuntimeError):
    """No loopback address is free for a pod; the text names the ports."""


class LoopbackNetwork:
    """The block of addresses of one deployment, locked until closed."""

    def __init__(self, name: str) -> None:
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _BLOCKS
        for block in range(first, first + _BLOCK_ATTEMPTS):
            high, low = divmod(block % _BLOCKS, 256)
            self._prefix = f"127.{64 + high}.{low}"
            with contextlib.suppress(OSError):
                # Two sockets of SO_REUSEADDR may be bound alike while neither listens.
                self._lock = _bind_socket(f"{self._prefix}.255", _LOCK_PORT, reuses=False)
                break
        else:
            raise AddressShortageError(
                f"no loopback block is free: is port {_LOCK_PORT} in use on all of them?"
            )
        self._allocated: set[str] = set()

    def allocate(self, ports: Iterable[int]) -> str:
        """An address of the block on which all `ports` are free. Raises AddressShortageError."""
        required = tuple(ports)
        for host in range(1, 255):
            address = f"{self._prefix}.{host}"
            if address not in self._allocated and not find_busy_ports(address, required):
                self._allocated.add(address)
                return address
        raise AddressShortageError(
            f"ports {', '.join(map(str, required))} are in use on all of {self._prefix}.0/24:"
            " does a program listen on 0.0.0.0?"
        )

    def release(self, address: str) -> None:
        """Free `address`."""
        self._allocated.discard(address)

    def close(self) -> None:
        """Unlock the block."""
        self._lock.close()


def find_busy_ports(address: str, ports: Iterable[int]) -> list[int]:
    """Those of `ports` that another program listens on at `address`."""
    busy = []
    for port in ports:
        try:
            _bind_socket(address, port, reuses=True).close()
        except OSError:
            busy.append(port)
    return busy


def find_internal_port(port: int) -> int:
    """A free internal port for the gateway at `port`, so that several deployments can run. It lies
    10,000 above or below, which leaves the adjacent ports to other gateways."""
    first = port + _INTERNAL_PORT_OFFSET
    if first > _MAX_PORT:
        first = port - _INTERNAL_PORT_OFFSET
    near = range(first, min(first + _INTERNAL_ATTEMPTS, _MAX_PORT))
    return next((each for each in near if not find_busy_ports(HOST_IP, [each])), first)


def _bind_socket(address: str, port: int, *, reuses: bool) -> socket.socket:
    bound = socket.socket()
    try:
        # Past connections in TIME_WAIT do not make a port busy then; a listener does.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound
