"""`python -m cleave.gateway.main`, the command that pods run; `cleave gateway` calls the same.

Exit codes: 0 stopped by a signal, 1 an address cannot be bound or a part has failed, 2 bad usage.
"""

import argparse
import asyncio
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import uvloop

from cleave import logs
from cleave.api.enums import DispatchPolicy, FallbackPolicy, FlippingMode, LateRequestPolicy
from cleave.gateway import file_limit, process_supervisor
from cleave.gateway.admission.tenants import ApiKeysError
from cleave.gateway.config import GatewayConfig, Timeouts
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError
from cleave.gateway.server import GatewayServer
from cleave.gateway.shared_state import SharedGatewayState
from cleave.gateway.tls import TlsError
from cleave.gateway.tracing.access_log import ACCESS_LOGGER
from cleave.gateway.tracing.request_record import TracingError
from cleave.rpc.agent_discovery import ENV, DiscoveryError
from cleave.rpc.listen_addresses import parse_hosts
from cleave.traffic.length_file import LengthsError

__all__ = ["GatewayConfig", "main", "parse_size", "run"]

log = logging.getLogger("cleave.gateway")

PROGRAM = "python -m cleave.gateway.main"
_DESCRIPTION = "Serve the OpenAI API in front of the instances that the agents report."
_EXIT_CODES = (
    "Exit codes: 0 stopped by a signal, 1 an address cannot be bound or a part has failed, "
    "2 bad usage."
)
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MAX_PROCESSES = 64
GC_THRESHOLDS = (1_000, 10, 1_000)
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    if config.processes == 1:
        return _serve_process(config)
    try:
        return process_supervisor.run_processes(config, _serve_process)
    except OSError as error:
        return _log_listen_error(config, error)


def _serve_process(config: GatewayConfig, shared_state: SharedGatewayState | None = None) -> int:
    """Serve in this process; `shared_state`: that of the other processes, if there are several."""
    try:
        with logs.write_in_background(ACCESS_LOGGER) if config.access_log else nullcontext():
            return uvloop.run(_serve(config, shared_state))
    except (
        DiscoveryError,
        ApiKeysError,
        LengthsError,
        EndpointPickerError,
        TlsError,
        TracingError,
    ) as error:
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
        # The objects so far live as long as the process; scanning them would take 12 ms per
        # full garbage collection.
        gc.freeze()
        # With thousands of connections a full collection stops all requests for 50 ms and more.
        # What a request leaves is freed without the collector, or by its two young generations.
        gc.set_threshold(*GC_THRESHOLDS)
        scheme = "http" if config.tls_certificate is None else "https"
        if shared_state is None:
            log.info("listening on %s://%s:%d", scheme, config.host, gateway.port)
        await stop.wait()
        if shared_state is None:
            log.info("draining")
    finally:
        await gateway.stop()
    return 1 if gateway.failed else 0


def parse_size(text: str) -> int:
    """Bytes of `16MiB`, `512Ki`, `1000`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)B?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * _UNITS[match[2]]


def _parse_ratio(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _resolve_otlp_endpoint(endpoint: str | None) -> str | None:
    """The collector's URL; empty: from the environment; None: no tracing."""
    if endpoint is None and any(map(os.environ.get, _OTLP_VARIABLES)):
        return ""
    return endpoint or None


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Parse the command line and run; `program` is the name in the help."""
    parser = _build_parser(program)
    options = parser.parse_args(arguments)
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key go together: give both or neither")
    if (options.endpoint_picker_cert is None) != (options.endpoint_picker_key is None):
        parser.error("--endpoint-picker-cert and -key go together: give both or neither")
    if options.endpoint_picker_plain and options.endpoint_picker_cert is not None:
        parser.error("--endpoint-picker-plain: needs no certificate: leave out one of them")
    if options.max_partial < options.max_body:
        parser.error(
            f"--max-partial {options.max_partial} is below --max-body {options.max_body}: "
            "no body of that size could be received"
        )
    if not 1 <= options.processes <= MAX_PROCESSES:
        parser.error(f"--processes must be 1 to {MAX_PROCESSES}: give at most one a core")
    logs.configure(options.log_format)
    file_limit.raise_open_file_limit(options.max_clients)
    return run(
        GatewayConfig(
            agents=options.agents,
            hosts=options.host,
            port=options.port,
            processes=options.processes,
            internal_port=options.internal_port,
            router_port=options.router_port,
            endpoint_picker_port=options.endpoint_picker_port,
            endpoint_picker_direct=options.endpoint_picker_direct,
            endpoint_picker_certificate=options.endpoint_picker_cert,
            endpoint_picker_key=options.endpoint_picker_key,
            endpoint_picker_plain=options.endpoint_picker_plain,
            api_keys=options.api_keys,
            tls_certificate=options.tls_cert,
            tls_key=options.tls_key,
            fallback=options.fallback,
            policy=options.policy,
            session_header=options.session_header,
            output_length_model=options.lengths,
            whole_below_tokens=options.whole_below,
            ahead_from_tokens=options.ahead_from,
            flipping=options.flipping,
            min_prefill=options.min_prefill,
            min_decode=options.min_decode,
            ttft_slo_ms=options.ttft_ms,
            tpot_slo_ms=options.tpot_ms,
            late_policy=options.late,
            access_log=options.access_log,
            otlp_endpoint=_resolve_otlp_endpoint(options.otlp_endpoint),
            trace_sample_ratio=options.trace_share,
            queue_limit=options.queue_limit,
            max_body_bytes=options.max_body,
            max_partial_bytes=options.max_partial,
            max_clients=options.max_clients,
            engine_connections=options.engine_connections,
            timeouts=Timeouts(
                connect_s=options.connect_timeout,
                first_byte_s=options.first_byte_timeout,
                response_s=options.answer_timeout,
                idle_s=options.idle_timeout,
                wake_s=options.wake_timeout,
                resume_s=options.resume_timeout,
                shutdown_delay_s=options.leave_delay,
                drain_s=options.drain_timeout,
            ),
        )
    )


def _build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    default, waits = GatewayConfig(agents=""), Timeouts()
    parser = argparse.ArgumentParser(program, description=_DESCRIPTION, epilog=_EXIT_CODES)
    add = parser.add_argument
    add(
        "--host",
        type=parse_hosts,
        default=default.host,
        metavar="HOST,...",
        help="addresses to listen on; the first one is the address under which others reach it",
    )
    add("--port", type=int, default=default.port, help="0: any free port")
    add(
        "--processes",
        type=int,
        default=default.processes,
        help="processes that serve the port and share their load accounting; one for each core",
    )
    add(
        "--agents",
        default=os.environ.get(ENV),
        required=ENV not in os.environ,
        help=f"file:PATH, endpoints:NAMESPACE/SERVICE:PORT, dns:NAME:PORT or HOST:PORT,... "
        f"(default: ${ENV})",
    )
    add(
        "--internal-port",
        type=int,
        default=default.internal_port,
        help="/fleet, /health, /metrics and /livez, for the operator; 0: off",
    )
    add("--router-port", type=int, default=default.router_port, help="gRPC Router service; 0: off")
    add(
        "--endpoint-picker-port",
        type=int,
        default=default.endpoint_picker_port,
        help="endpoint picker (Envoy's ext_proc) for gateways that route to an InferencePool; "
        "0: off",
    )
    add(
        "--endpoint-picker-direct",
        action="store_true",
        help="the endpoint picker sends completions that are not split directly to instances",
    )
    add(
        "--endpoint-picker-cert",
        type=Path,
        metavar="FILE",
        help="PEM, with its chain, as --tls-cert; without it the certificate is self-signed",
    )
    add("--endpoint-picker-key", type=Path, metavar="FILE", help="PEM, without a password")
    add(
        "--endpoint-picker-plain",
        action="store_true",
        help="the endpoint picker serves gRPC without TLS, for proxies configured for that",
    )
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="one key a line, or tenants with their keys and limits; default: no authentication",
    )
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM, with its chain: the port serves HTTPS; read again when it changes",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM, without a password")
    add(
        "--fallback",
        type=FallbackPolicy,
        default=default.fallback,
        metavar="{" + ",".join(rule.value for rule in FallbackPolicy) + "}",
        help="when a request that should be split may run entirely on a decode instance",
    )
    add("--ttft-ms", type=float, default=0.0, metavar="MS", help="target to measure; 0: none")
    add("--tpot-ms", type=float, default=0.0, metavar="MS", help="target to measure; 0: none")
    add(
        "--late",
        type=LateRequestPolicy,
        default=default.late_policy,
        metavar="{" + ",".join(rule.value for rule in LateRequestPolicy) + "}",
        help="what happens to requests that can no longer meet --ttft-ms",
    )
    add(
        "--policy",
        type=DispatchPolicy,
        default=default.policy,
        metavar="{" + ",".join(policy.value for policy in DispatchPolicy) + "}",
        help="how instances are picked for a request",
    )
    add(
        "--session-header",
        default=default.session_header,
        metavar="NAME",
        help="one instance computes the prompts of all requests with the same value in this header",
    )
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="from cleave lengths train: predicts output lengths; used if it was measured to be "
        "better than the mean by prompt length",
    )
    add(
        "--whole-below",
        type=int,
        default=default.whole_below_tokens,
        metavar="TOKENS",
        help="while prefill instances are busy, the decode instance computes prompts up to this "
        "length itself; 0: none",
    )
    add(
        "--ahead-from",
        type=int,
        default=default.ahead_from_tokens,
        metavar="TOKENS",
        help="KV of prompts from this length on is transferred while it is computed, by workers "
        "with --transfer auto; 0: none",
    )
    logs.add_option(parser)
    add("--access-log", action="store_true", help="log each request, without its content")
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="collector that traces are sent to, such as http://HOST:4317 "
        "(default: as OpenTelemetry's environment variables say)",
    )
    add(
        "--trace-share",
        type=_parse_ratio,
        default=default.trace_sample_ratio,
        metavar="SHARE",
        help="share of requests without a traceparent to trace, 0 to 1",
    )
    add(
        "--flipping",
        type=FlippingMode,
        default=default.flipping,
        metavar="{" + ",".join(rule.value for rule in FlippingMode) + "}",
        help="whether instances change roles while prompts queue or decode instances are full",
    )
    add("--min-prefill", type=int, default=1, help="prefill instances that keep their role")
    add("--min-decode", type=int, default=1, help="decode instances that keep their role")
    add("--queue-limit", type=int, default=default.queue_limit, help="requests without a response")
    add("--max-body", type=parse_size, default=default.max_body_bytes, metavar="SIZE")
    add(
        "--max-partial",
        type=parse_size,
        default=default.max_partial_bytes,
        metavar="SIZE",
        help="memory for requests that are being received; beyond that, requests get 503",
    )
    add(
        "--max-clients",
        type=int,
        default=default.max_clients,
        help="open connections; beyond that, idle ones are closed",
    )
    add("--engine-connections", type=int, default=default.engine_connections, help="to each engine")
    add("--connect-timeout", type=float, default=waits.connect_s, metavar="S")
    add("--first-byte-timeout", type=float, default=waits.first_byte_s, metavar="S")
    add("--answer-timeout", type=float, default=waits.response_s, metavar="S", help="not streamed")
    add("--idle-timeout", type=float, default=waits.idle_s, metavar="S")
    add(
        "--wake-timeout",
        type=float,
        default=waits.wake_s,
        metavar="S",
        help="how long a request waits for an instance when none can take it",
    )
    add(
        "--resume-timeout",
        type=float,
        default=waits.resume_s,
        metavar="S",
        help="how long a stream that lost its engine waits for another instance",
    )
    add(
        "--leave-delay",
        type=float,
        default=waits.shutdown_delay_s,
        metavar="S",
        help="from SIGTERM until new connections are refused",
    )
    add("--drain-timeout", type=float, default=waits.drain_s, metavar="S")
    return parser


if __name__ == "__main__":
    sys.exit(main())
