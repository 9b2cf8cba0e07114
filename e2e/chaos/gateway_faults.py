"""What each fault does to a gateway: its processes, and the memory that its clients share."""

import ctypes
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from e2e.chaos.faults import Fault
from e2e.chaos.gateways import MAX_BODY, MAX_BUFFERED, Gateway
from e2e.chaos.worker_faults import stopped

SLICE_S = 0.1
"""A starved gateway runs for a tenth of each."""
CONNECT_S = 3.0
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
"""Requests of ptrace(2)."""
_WALL = 0x40000000
"""Of waitpid(2): for threads as well."""


@contextmanager
def inflicted_on_gateway(fault: Fault, gateway: Gateway) -> Iterator[None]:
    """The fault lasts while this is open; the gateway serves again when it is closed."""
    match fault.kind:
        case "kill gateway process":
            gateway.kill_process(random.Random(fault.number))
            yield
        case "freeze gateway":
            with gateway.held(), stopped(gateway.list_processes()):
                yield
        case "freeze gateway process":
            child = random.Random(fault.number).choice(gateway.list_processes()[1:])
            with gateway.held(), stopped([child]):
                yield
        case "freeze gateway loop":
            # Of one process; the parent of several has no event loop.
            processes = gateway.list_processes()
            serving = processes[1:] or processes
            with gateway.held(), halted(random.Random(fault.number).choice(serving).pid):
                yield
        case "starve gateway":
            with gateway.held(), starved(gateway.list_processes()):
                yield
        case "fill buffers":
            with gateway.filled(), withheld_bodies(gateway):
                yield
        case _:
            gateway.count()
            gateway.kill()
            try:
                yield
            finally:
                gateway.start()


@contextmanager
def halted(thread_id: int) -> Iterator[None]:
    """One thread stands still and the others of its process go on, as in a debugger.

    So an event loop is late in the middle of a callback, while gRPC's threads read and answer. To
    be closed in the thread that has opened it. Raises ProcessLookupError and PermissionError.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def trace(request: int) -> None:
        if libc.ptrace(request, thread_id, None, None) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    trace(_SEIZE)
    try:
        trace(_INTERRUPT)
        os.waitpid(thread_id, _WALL)
        yield
    finally:
        with suppress(OSError):
            trace(_DETACH)


@contextmanager
def starved(processes: list[psutil.Process]) -> Iterator[None]:
    """They get a tenth of the time, as under a limit of CPU or on a busy machine."""
    over = threading.Event()

    def starve() -> None:
        while not over.is_set():
            with suppress(psutil.NoSuchProcess), stopped(processes):
                over.wait(0.9 * SLICE_S)
            over.wait(0.1 * SLICE_S)

    thread = threading.Thread(target=starve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def withheld_bodies(gateway: Gateway) -> Iterator[None]:
    """Clients that fill the gateway's memory for bodies: none sends the last byte of its own."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: gateway", f"Content-Length: {MAX_BODY}"]
    lines += [f"Authorization: Bearer {gateway.keys[0]}"] if gateway.keys else []
    head = "\r\n".join([*lines, "", ""]).encode()
    with ExitStack() as stack:
        # Of several processes each takes its share of the connections.
        for _ in range(gateway.processes * (MAX_BUFFERED // MAX_BODY + 1)):
            address = "127.0.0.1", gateway.port
            with suppress(OSError):
                client = stack.enter_context(socket.create_connection(address, CONNECT_S))
                client.sendall(head + b" " * (MAX_BODY - 1))
        yield
