"""Supervisor of a gateway of several processes on one port: starts, monitors and stops them.

Called by main. The kernel spreads connections over the processes (SO_REUSEPORT); their shared state
is in `shared_state`. They are forked, so that one that died is replaced within milliseconds and all
share the memory of imported modules; hence the parent has no event loop and no thread. What is
hard: with SO_REUSEPORT another gateway could bind the same port, so the port is first bound
exclusively; and a killed parent must not leave serving children behind, so each child holds the
read end of a pipe that the parent never writes to.
"""

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.gateway.config import GatewayConfig
from cleave.gateway.shared_state import SharedGatewayState
from cleave.router.watchdog import WatchdogTimer

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
HUNG_TIMEOUT_S = 30.0
"""A process without a heartbeat for so long is killed."""
MIN_RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 5.0
"""Delays before a process that died is replaced: doubled each time."""
STABLE_AFTER_S = 60.0
MAX_DEATHS = 10
"""Deaths of all processes within STABLE_AFTER_S after which the supervisor gives up."""
SHUTDOWN_MARGIN_S = 5.0
"""After the shutdown delay and drain timeout, until the remaining processes are killed."""

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_SIGNALS = {*_STOP_SIGNALS, signal.SIGCHLD}

Serve = Callable[[GatewayConfig, SharedGatewayState], int]
"""Runs one process until a signal stops it; returns its exit code."""


@dataclass(slots=True)
class _ChildProcess:
    """A child process, or its scheduled restart."""

    pid: int = 0
    """0: not running; it will be started at `start_at`."""
    start_at: float = 0.0
    delay_s: float = 0.0
    started_at: float = 0.0


def run_processes(config: GatewayConfig, serve: Serve) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. Raises OSError if it cannot listen."""
    with ExitStack() as stack:
        for host in config.hosts:
            reserved = stack.enter_context(reserve_port(host, config.port))
            config = replace(config, port=reserved.getsockname()[1])
            if config.internal_port:
                stack.enter_context(reserve_port(host, config.internal_port))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cleave-gateway-"))
        reading, writing = os.pipe()
        shared_state = SharedGatewayState(config.processes, Path(folder), reading)
        stack.callback(shared_state.close)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        gc.freeze()
        return _ProcessSupervisor(config, shared_state, serve, writing).run()


def reserve_port(host: str, port: int) -> socket.socket:
    """Reserve a port for the processes of this gateway; this socket itself gets no connections.
    Raises OSError when another program listens there already."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as exclusive:
        exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        exclusive.bind(address)
        address = exclusive.getsockname()
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


class _ProcessSupervisor:
    """The supervising process; single-threaded, woken by signals."""

    def __init__(
        self, config: GatewayConfig, shared_state: SharedGatewayState, serve: Serve, pipe: int
    ) -> None:
        self._config = config
        self._shared_state = shared_state
        self._serve = serve
        self._pipe = pipe
        self._children = [_ChildProcess() for _ in range(shared_state.num_processes)]
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._ready = False
        self._poll_timer = WatchdogTimer(POLL_INTERVAL_S)
        self._exit_code: int | None = None

    def run(self) -> int:
        """Start all processes, restart them when they die, stop them."""
        while self._exit_code is None:
            now = time.monotonic()
            for process, child in enumerate(self._children):
                if not child.pid and now >= child.start_at:
                    self._start_child(process, child, now)
            self._log_ready()
            self._wait_for_signal()
            self._reap_children()
            if self._poll_timer.is_reliable:
                self._kill_hung()
        self._stop_children()
        return self._exit_code

    def _start_child(self, process: int, child: _ChildProcess, now: float) -> None:
        child.started_at, parent = now, os.getpid()
        try:
            child.pid = os.fork()
        except OSError as error:
            log.error("process %d cannot be started: %s", process + 1, error)
            child.start_at = now + MAX_RESTART_DELAY_S
            return
        if child.pid == 0:
            os.close(self._pipe)
            shared_state = self._shared_state.for_process(process)
            os._exit(_run_child(self._serve, self._config, shared_state, parent))

    def _log_ready(self) -> None:
        config, count = self._config, self._shared_state.num_processes
        if not self._ready and len(self._shared_state.list_pids()) == count:
            self._ready = True
            scheme = "http" if config.tls_certificate is None else "https"
            url = f"{scheme}://{config.host}:{config.port}"
            log.info("listening on %s with %d processes", url, count)

    def _wait_for_signal(self) -> None:
        received = signal.sigtimedwait(_SIGNALS, POLL_INTERVAL_S)
        self._poll_timer.tick()
        # After SIGCONT Python's sigtimedwait may return a signal that was never sent.
        if received is not None and received.si_signo in _STOP_SIGNALS:
            log.info("draining")
            self._exit_code = 0

    def _reap_children(self) -> None:
        """Collect processes that have ended, and schedule their restarts."""
        for process, child in enumerate(self._children):
            code = _reap_pid(child.pid)
            if code is None:
                continue
            self._shared_state.clear_process(process)
            child.pid = 0
            if self._exit_code is not None:
                continue
            if not self._ready and code > 0:
                # A start that fails with an exit code would fail again; it has logged why.
                self._exit_code = code
                continue
            end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            log.error("process %d %s; it will be restarted", process + 1, end)
            self._schedule_restart(child, time.monotonic())

    def _schedule_restart(self, child: _ChildProcess, now: float) -> None:
        """Schedule a restart, unless too many processes died and none has run for long."""
        child.delay_s = min(max(2 * child.delay_s, MIN_RESTART_DELAY_S), MAX_RESTART_DELAY_S)
        if now - child.started_at > STABLE_AFTER_S:
            child.delay_s = MIN_RESTART_DELAY_S
        child.start_at = now + child.delay_s
        self._shared_state.record_restart()
        self._deaths.append(now)
        running = [each for each in self._children if each.pid]
        is_any_stable = any(now - each.started_at > STABLE_AFTER_S for each in running)
        are_many = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < STABLE_AFTER_S
        if are_many and not is_any_stable:
            log.error("%d processes died within %g s: giving up", MAX_DEATHS, STABLE_AFTER_S)
            self._exit_code = 1

    def _kill_hung(self) -> None:
        now = time.monotonic()
        for process, child in enumerate(self._children):
            hung_s = now - max(self._shared_state.get_heartbeat(process), child.started_at)
            if child.pid and hung_s > HUNG_TIMEOUT_S:
                log.error("process %d has hung for %.0f s: killing it", process + 1, hung_s)
                os.kill(child.pid, signal.SIGKILL)

    def _stop_children(self) -> None:
        """Let all processes finish their requests, then kill those that remain."""
        timeouts = self._config.timeouts
        self._signal_children(signal.SIGTERM)
        wait_s = timeouts.shutdown_delay_s + timeouts.drain_s + SHUTDOWN_MARGIN_S
        deadline = time.monotonic() + wait_s
        while any(child.pid for child in self._children):
            if time.monotonic() > deadline:
                self._signal_children(signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, POLL_INTERVAL_S)
            self._reap_children()

    def _signal_children(self, number: int) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)


def _run_child(serve: Serve, config: GatewayConfig, shared: SharedGatewayState, parent: int) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if shared.process_index:
            # Tickets of these services are valid only in the process that issued them.
            config = replace(config, router_port=0, endpoint_picker_port=0)
        return serve(config, shared)
    except BaseException:
        log.exception("process %d ends", shared.process_index + 1)
        return 70
    finally:
        if os.getppid() != parent:
            shared.remove_files()
        sys.stdout.flush()
        sys.stderr.flush()


def _reap_pid(pid: int) -> int | None:
    """The exit code of an ended child, -N if signal N killed it; None: it runs, or `pid` is 0."""
    if not pid:
        return None
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
