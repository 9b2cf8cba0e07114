"""`python -m cleave.gateway.main`, the command that pods run, and `cleave gateway`, its other door.

Exit codes: 0 stopped by a signal, 1 the address cannot be had or a part has failed, 2 bad usage.
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

from cleave.api.enums import DispatchPolicy
from cleave.gateway import open_files, processes
from cleave.gateway.admission.tenants import KeysError
from cleave.gateway.config import GatewayConfig, Late, Timeouts
from cleave.gateway.picker.credentials import PickerError
from cleave.gateway.server import Gateway
from cleave.gateway.siblings import Siblings
from cleave.gateway.stories.access_log import ACCESS
from cleave.gateway.stories.story import TracingError
from cleave.gateway.tls import TlsError
from cleave.metrics import logs
from cleave.router.pool_manager import Flipping
from cleave.router.router import Fallback
from cleave.rpc.discovery import ENV, DiscoveryError
from cleave.rpc.listen import parse_hosts
from cleave.traffic.length_file import LengthsError

__all__ = ["GatewayConfig", "main", "parse_size", "run"]

log = logging.getLogger("cleave.gateway")

PROGRAM = "python -m cleave.gateway.main"
_DESCRIPTION = "Serve the OpenAI API in front of the instances whose agents it follows."
_EXIT_CODES = (
    "Exit codes: 0 stopped by a signal, 1 the address cannot be had or a part has failed, "
    "2 bad usage."
)
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MAX_PROCESSES = 64
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    if config.processes == 1:
        return _serve_alone(config)
    try:
        return processes.run(config, _serve_alone)
    except OSError as error:
        return _tell_address(config, error)


def _serve_alone(config: GatewayConfig, siblings: Siblings | None = None) -> int:
    """`siblings`: of which this process is one."""
    try:
        with logs.write_aside(ACCESS) if config.access_log else nullcontext():
            return uvloop.run(_serve(config, siblings))
    except (DiscoveryError, KeysError, LengthsError, PickerError, TlsError, TracingError) as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        return _tell_address(config, error)


def _tell_address(config: GatewayConfig, error: OSError) -> int:
    log.error("cannot listen on %s, port %d: %s", ", ".join(config.hosts), config.port, error)
    return 1


async def _serve(config: GatewayConfig, siblings: Siblings | None) -> int:
    gateway = Gateway(config, siblings)
    stop = gateway.ending
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if siblings is not None:
        # The parent never writes: it can be read from when the parent has gone.
        loop.add_reader(siblings.parent, stop.set)
    try:
        await gateway.start()
        # What is there now stays: a full collection that looks through it takes 12 ms.
        gc.freeze()
        scheme = "http" if config.tls_certificate is None else "https"
        if siblings is None:
            log.info("listening on %s://%s:%d", scheme, config.host, gateway.port)
        await stop.wait()
        if siblings is None:
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


def _parse_share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _find_collector(stated: str | None) -> str | None:
    """Where traces go; empty: as the environment says; None: nowhere."""
    if stated is None and any(map(os.environ.get, _OTLP_VARIABLES)):
        return ""
    return stated or None


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Read the command line and run; `program` is how the help names it."""
    parser = _build_parser(program)
    stated = parser.parse_args(arguments)
    if (stated.tls_cert is None) != (stated.tls_key is None):
        parser.error("--tls-cert and --tls-key go together: give both or neither")
    if (stated.endpoint_picker_cert is None) != (stated.endpoint_picker_key is None):
        parser.error("--endpoint-picker-cert and -key go together: give both or neither")
    if stated.endpoint_picker_plain and stated.endpoint_picker_cert is not None:
        parser.error("--endpoint-picker-plain: needs no certificate: leave out one of them")
    if stated.max_partial < stated.max_body:
        parser.error(
            f"--max-partial {stated.max_partial} is below --max-body {stated.max_body}: no body of "
            "that size could be received"
        )
    if not 1 <= stated.processes <= MAX_PROCESSES:
        parser.error(f"--processes must be 1 to {MAX_PROCESSES}: give at most one a core")
    logs.set_up(stated.log_format)
    open_files.raise_limit(stated.max_clients)
    return run(
        GatewayConfig(
            agents=stated.agents,
            hosts=stated.host,
            port=stated.port,
            processes=stated.processes,
            internal_port=stated.internal_port,
            router_port=stated.router_port,
            endpoint_picker_port=stated.endpoint_picker_port,
            endpoint_picker_direct=stated.endpoint_picker_direct,
            endpoint_picker_certificate=stated.endpoint_picker_cert,
            endpoint_picker_key=stated.endpoint_picker_key,
            endpoint_picker_plain=stated.endpoint_picker_plain,
            api_keys=stated.api_keys,
            tls_certificate=stated.tls_cert,
            tls_key=stated.tls_key,
            fallback=stated.fallback,
            policy=stated.policy,
            session_header=stated.session_header,
            lengths=stated.lengths,
            whole_below_tokens=stated.whole_below,
            ahead_from_tokens=stated.ahead_from,
            flipping=stated.flipping,
            min_prefill=stated.min_prefill,
            min_decode=stated.min_decode,
            ttft_slo_ms=stated.ttft_ms,
            tpot_slo_ms=stated.tpot_ms,
            late=stated.late,
            access_log=stated.access_log,
            otlp_endpoint=_find_collector(stated.otlp_endpoint),
            trace_share=stated.trace_share,
            queue_limit=stated.queue_limit,
            max_body_bytes=stated.max_body,
            max_partial_bytes=stated.max_partial,
            max_clients=stated.max_clients,
            engine_connections=stated.engine_connections,
            timeouts=Timeouts(
                connect_s=stated.connect_timeout,
                first_byte_s=stated.first_byte_timeout,
                answer_s=stated.answer_timeout,
                idle_s=stated.idle_timeout,
                wake_s=stated.wake_timeout,
                resume_s=stated.resume_timeout,
                leave_s=stated.leave_delay,
                drain_s=stated.drain_timeout,
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
        help="addresses to listen on; the first is this gateway's own, by which others name it",
    )
    add("--port", type=int, default=default.port, help="0: any free port")
    add(
        "--processes",
        type=int,
        default=default.processes,
        help="that serve the port together, knowing of each other's load; one for each core",
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
        help="it sends completions that are not split to instances, past this gateway",
    )
    add(
        "--endpoint-picker-cert",
        type=Path,
        metavar="FILE",
        help="PEM, with its chain, as --tls-cert; without it the endpoint picker signs its own",
    )
    add("--endpoint-picker-key", type=Path, metavar="FILE", help="PEM, without a password")
    add(
        "--endpoint-picker-plain",
        action="store_true",
        help="it speaks gRPC without TLS, for proxies that are told so",
    )
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="one key a line, or tenants with their keys and limits; without it all are served",
    )
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM, with its chain: the port speaks HTTPS; read again when it changes",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM, without a password")
    add(
        "--fallback",
        type=Fallback,
        default=default.fallback,
        metavar="{" + ",".join(rule.value for rule in Fallback) + "}",
        help="when a request that should be split may run whole on a decode instance",
    )
    add("--ttft-ms", type=float, default=0.0, metavar="MS", help="target that is counted; 0: none")
    add("--tpot-ms", type=float, default=0.0, metavar="MS", help="target that is counted; 0: none")
    add(
        "--late",
        type=Late,
        default=default.late,
        metavar="{" + ",".join(rule.value for rule in Late) + "}",
        help="requests that cannot meet --ttft-ms any more",
    )
    add(
        "--policy",
        type=DispatchPolicy,
        default=default.policy,
        metavar="{" + ",".join(policy.value for policy in DispatchPolicy) + "}",
        help="which instances a request gets",
    )
    add(
        "--session-header",
        default=default.session_header,
        metavar="NAME",
        help="prompts of requests with the same value in this header keep to one instance",
    )
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="made by cleave lengths train: foretells how long answers will be, where it was found "
        "better than the mean by prompt length",
    )
    add(
        "--whole-below",
        type=int,
        default=default.whole_below_tokens,
        metavar="TOKENS",
        help="prompts up to so long are computed where they are decoded while prefill instances "
        "are busy; 0: none",
    )
    add(
        "--ahead-from",
        type=int,
        default=default.ahead_from_tokens,
        metavar="TOKENS",
        help="prompts from so many on are moved while they are computed, by workers with "
        "--transfer auto; 0: none",
    )
    logs.add_option(parser)
    add("--access-log", action="store_true", help="a line for each request, without what it says")
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="collector that traces are sent to, such as http://HOST:4317 "
        "(default: as OpenTelemetry's environment variables say)",
    )
    add(
        "--trace-share",
        type=_parse_share,
        default=default.trace_share,
        metavar="SHARE",
        help="of requests without a traceparent, 0 to 1",
    )
    add(
        "--flipping",
        type=Flipping,
        default=default.flipping,
        metavar="{" + ",".join(rule.value for rule in Flipping) + "}",
        help="whether instances take other roles while prompts wait or decoding is full",
    )
    add("--min-prefill", type=int, default=1, help="prefill instances that keep their role")
    add("--min-decode", type=int, default=1, help="decode instances that keep their role")
    add("--queue-limit", type=int, default=default.queue_limit, help="requests without an answer")
    add("--max-body", type=parse_size, default=default.max_body_bytes, metavar="SIZE")
    add(
        "--max-partial",
        type=parse_size,
        default=default.max_partial_bytes,
        metavar="SIZE",
        help="of requests that are being received, all together; more get 503",
    )
    add(
        "--max-clients",
        type=int,
        default=default.max_clients,
        help="connections; for more, idle ones are closed",
    )
    add("--engine-connections", type=int, default=default.engine_connections, help="to each engine")
    add("--connect-timeout", type=float, default=waits.connect_s, metavar="S")
    add("--first-byte-timeout", type=float, default=waits.first_byte_s, metavar="S")
    add("--answer-timeout", type=float, default=waits.answer_s, metavar="S", help="not streamed")
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
        help="the same for a stream that has lost its engine",
    )
    add(
        "--leave-delay",
        type=float,
        default=waits.leave_s,
        metavar="S",
        help="after SIGTERM, until new connections are refused",
    )
    add("--drain-timeout", type=float, default=waits.drain_s, metavar="S")
    return parser


if __name__ == "__main__":
    sys.exit(main())
