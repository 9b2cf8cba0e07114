"""`python -m cleave.gateway.main`, the command that pods run; `cleave gateway` calls the same.

Exit codes: 0 stopped by a signal, 1 an address cannot be bound or a part has failed, 2 bad usage.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import uvloop

from cleave import logs
from cleave.gateway import process_supervisor
from cleave.gateway.admission.tenants import ApiKeysError
from cleave.gateway.config import GatewayConfig, Timeouts, build_config
from cleave.gateway.context import MAX_INTERNAL_CLIENTS
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError
from cleave.gateway.garbage_collection import collect_in_steps
from cleave.gateway.server import GatewayServer
from cleave.gateway.shared_state import SharedGatewayState
from cleave.gateway.tls import TlsError
from cleave.gateway.tracing.access_log import ACCESS_LOGGER
from cleave.gateway.tracing.request_record import TracingError
from cleave.options import add_options
from cleave.rpc.agent_discovery import DiscoveryError

__all__ = ["GatewayConfig", "main", "run"]

log = logging.getLogger("cleave.gateway")

PROGRAM = "python -m cleave.gateway.main"
_DESCRIPTION = "Serve the OpenAI API in front of the instances that the agents report."
_EXIT_CODES = (
    "Exit codes: 0 stopped by a signal, 1 an address cannot be bound or a part has failed, "
    "2 bad usage."
)
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MAX_OPEN_FILES = 1 << 20
"""Some systems allow a billion, and some libraries iterate over all of them."""
OWN_FILES = 64
"""Open files of a gateway besides connections of clients and to engines."""
_ERRORS = (ApiKeysError, DiscoveryError, EndpointPickerError, TlsError, TracingError)
"""Of the configuration: exit code 2."""


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    if config.processes == 1:
        return _serve_process(config)
    try:
        return process_supervisor.run_processes(config, _serve_process)
    except OSError as error:
        return _log_listen_error(config, error)


def _serve_process(config: GatewayConfig, shared_state: SharedGatewayState | None = None) -> int:
    """Serve in this process; returns the exit code."""
    try:
        with logs.write_in_background(ACCESS_LOGGER) if config.access_log else nullcontext():
            return uvloop.run(_serve(config, shared_state))
    except _ERRORS as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        return _log_listen_error(config, error)


def _log_listen_error(config: GatewayConfig, error: OSError) -> int:
    log.error("cannot listen on %s, port %d: %s", ", ".join(config.hosts), config.port, error)
    return 1


async def _serve(config: GatewayConfig, shared_state: SharedGatewayState | None) -> int:
    gateway = GatewayServer(config, shared_state)
    stop = gateway.stop_requested
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if shared_state is not None:
        # The parent never writes, so the pipe becomes readable only when the parent has died.
        loop.add_reader(shared_state.parent_pipe, stop.set)
    try:
        await gateway.start()
        collecting = loop.create_task(collect_in_steps())
        scheme = "http" if config.tls_certificate is None else "https"
        if shared_state is None:
            log.info("listening on %s://%s:%d", scheme, config.host, gateway.port)
        await stop.wait()
        collecting.cancel()
        if shared_state is None:
            log.info("draining")
    finally:
        await gateway.stop()
    return 1 if gateway.failed else 0


def _resolve_otlp_endpoint(endpoint: str | None) -> str | None:
    """The OTLP collector's URL; empty: from the environment; None: no tracing."""
    if endpoint is None and any(map(os.environ.get, _OTLP_VARIABLES)):
        return ""
    return endpoint or None


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Parse the command line and run; `program` is the name in the help."""
    parser = _build_parser(program)
    options = parser.parse_args(arguments)
    options.otlp_endpoint = _resolve_otlp_endpoint(options.otlp_endpoint)
    try:
        config = build_config(options)
    except ValueError as error:
        parser.error(str(error))
    logs.configure(options.log_format)
    config = replace(config, max_clients=limit_clients(config.max_clients, raise_file_limit()))
    _report_open_access(config)
    return run(config)


def _report_open_access(config: GatewayConfig) -> None:
    if config.api_keys is not None:
        return
    if not all(map(_is_loopback, config.hosts)):
        log.warning(
            "any client that reaches %s may send requests: give --api-keys, or listen on 127.0.0.1",
            ", ".join(config.hosts),
        )
    elif not config.allowed_hosts:
        log.warning(
            "any web page in a browser of this machine may send requests: give --api-keys, or "
            "--allowed-hosts localhost"
        )


def _is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def raise_file_limit() -> int:
    """Raise the soft limit of open files, and thus of connections, to the hard limit; returns it.
    Shells and containers often start with a soft limit of 1,024. Processes that are forked later
    inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    if soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    log.info("up to %d files may be open instead of %d", limit, soft)
    return limit


def limit_clients(clients: int, files: int) -> int:
    """How many of so many clients may be connected where so many files may be open; logs a warning
    if they are fewer. The internal port and as many engines as clients have files, too."""
    spare = files - OWN_FILES
    fit = max((spare - min(MAX_INTERNAL_CLIENTS, spare // 8)) // 2, 1)
    if fit >= clients:
        return clients
    message = (
        "%d files may be open, too few for --max-clients %d and their engines, so %d clients are "
        "served at a time: raise the hard limit (ulimit -Hn)"
    )
    log.warning(message, files, clients, fit)
    return fit


def _build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    # Not all options in each error: their list is a screen long.
    usage = f"{program} --agents AGENTS [options]; {program} --help lists the options"
    parser = argparse.ArgumentParser(program, usage, _DESCRIPTION, _EXIT_CODES)
    add_options(parser, GatewayConfig, Timeouts)
    logs.add_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
