"""Configuration of a gateway: each option is declared here once, with its flag, default and help.

`cleave.gateway.main` builds the parser and the configuration from these declarations; pods are
started with the flags, and the reference is generated from the parser.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from cleave.api.enums import (
    ORIGIN,
    DispatchPolicy,
    FallbackPolicy,
    FlippingMode,
    LateRequestPolicy,
)
from cleave.rpc.listen_addresses import parse_hosts, parse_port

MAX_PROCESSES = 64
_MAX_COUNT = 1_000_000_000
_MAX_DURATION = 1e9
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of `16MiB`, `512Ki`, `1000`. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)B?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * _UNITS[match[2]]


def parse_ratio(text: str) -> float:
    """A number from 0 to 1. Raises argparse.ArgumentTypeError."""
    ratio = _parse_float(text)
    if not 0 <= ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return ratio


def parse_duration(text: str) -> float:
    """A number of seconds or milliseconds, 0 or more. Raises argparse.ArgumentTypeError."""
    duration = _parse_float(text)
    if not 0 <= duration <= _MAX_DURATION:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {_MAX_DURATION:,.0f}")
    return duration


def parse_count(text: str) -> int:
    """A whole number, 0 or more. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_COUNT):
        raise argparse.ArgumentTypeError(
            f"{text} is not a whole number between 0 and {_MAX_COUNT:,}"
        )
    return int(text)


def parse_limit(text: str) -> int:
    """A whole number, 1 or more: 0 would let nothing through. Raises argparse.ArgumentTypeError."""
    if (limit := parse_count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return limit


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins separated by commas, or `*`. Raises argparse.ArgumentTypeError."""
    origins = tuple(origin.strip() for origin in text.split(","))
    for origin in origins:
        if re.fullmatch(ORIGIN, origin) is None:
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin as browsers send it: write SCHEME://HOST or "
                "SCHEME://HOST:PORT in lower case, without a path, or * for all"
            )
    return origins


def parse_host_names(text: str) -> tuple[str, ...]:
    """Host names or addresses, without ports, separated by commas.
    Raises argparse.ArgumentTypeError."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if re.fullmatch(r"[-A-Za-z0-9._]+|\[[0-9a-f:.]+\]", name) is None:
            raise argparse.ArgumentTypeError(f"{name!r} is not a host name without a port")
    return names


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _parse_choice(kind: type[Enum], text: str) -> Enum:
    """A member of an enumeration. Raises argparse.ArgumentTypeError."""
    try:
        return kind(text)
    except ValueError:
        choices = ", ".join(each.value for each in kind)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {choices}") from None


def _declare(
    flag: str,
    default: object,
    help_text: str,
    *,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Declare a field that `flag` sets. The parser of its value follows from the default's type."""
    option = {"flag": flag, "help": help_text, "parse": parse, "metavar": metavar}
    return field(default=default, metadata=option)


def _declare_seconds(flag: str, default: float, help_text: str) -> Any:  # noqa: ANN401
    return _declare(flag, default, help_text, metavar="S")


def _declare_file(flag: str, help_text: str) -> Any:  # noqa: ANN401
    return _declare(flag, None, help_text, parse=Path, metavar="FILE")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of all waits, in seconds."""

    connect_s: float = _declare_seconds("--connect-timeout", 2.0, "TCP connection to an engine")
    first_byte_s: float = _declare_seconds(
        "--first-byte-timeout",
        120.0,
        "prefill, and the first token of a stream; includes queueing in the engine",
    )
    response_s: float = _declare_seconds(
        "--response-timeout",
        600.0,
        "a response that is not streamed: its first byte comes with its last token",
    )
    idle_s: float = _declare_seconds(
        "--idle-timeout",
        60.0,
        "between two pieces of a stream, of a request, or of what a client reads",
    )
    keep_alive_s: float = 75.0
    """A client's connection without a request."""
    wake_s: float = _declare_seconds(
        "--wake-timeout",
        0.0,
        "how long a request waits for an instance when none can take it; 0: it is refused at once",
    )
    resume_s: float = _declare_seconds(
        "--resume-timeout",
        30.0,
        "how long a stream that lost its engine waits for another instance",
    )
    shutdown_delay_s: float = _declare_seconds(
        "--shutdown-delay",
        0.0,
        "from SIGTERM until new connections are refused: as long as all nodes need to stop sending "
        "them here",
    )
    drain_s: float = _declare_seconds(
        "--drain-timeout", 30.0, "requests that still run when the gateway stops"
    )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of one gateway."""

    agents: str
    """Where to find the agents, in the form that cleave.rpc.agent_discovery reads."""
    deployment: str = _declare(
        "--deployment", "", "the LLMDeployment whose agents are accepted; default: of any"
    )
    model_names: tuple[str, ...] = _declare(
        "--model-names",
        (),
        "a model's name, and further ones by which clients may request it; default: those alone "
        "that engines have",
        parse=lambda text: tuple(text.split(",")),
        metavar="NAME,...",
    )
    hosts: tuple[str, ...] = _declare(
        "--host",
        ("127.0.0.1",),
        "addresses to listen on; the first one is the address under which others reach it",
        parse=parse_hosts,
        metavar="HOST,...",
    )
    port: int = _declare("--port", 8080, "0: any free port, written to the log", parse=parse_port)
    processes: int = _declare(
        "--processes",
        1,
        "processes that serve the port and share their load accounting; one for each core",
    )
    internal_port: int = _declare(
        "--internal-port",
        0,
        "/fleet, /health, /metrics and /livez without keys, for the operator and scrapers; 0: off",
        parse=parse_port,
    )
    router_port: int = _declare(
        "--router-port",
        0,
        "gRPC Router service, which gives the keys of engines to its callers; 0: off; needs "
        "--router-cert, --router-key and --router-client-ca",
        parse=parse_port,
    )
    router_certificate: Path | None = _declare_file(
        "--router-cert", "PEM, with its chain, as --tls-cert"
    )
    router_key: Path | None = _declare_file("--router-key", "PEM, without a password")
    router_client_ca: Path | None = _declare_file(
        "--router-client-ca",
        "PEM: the Router service serves only callers with a certificate of this authority, which "
        "is to sign for them alone",
    )
    endpoint_picker_port: int = _declare(
        "--endpoint-picker-port",
        0,
        "endpoint picker (Envoy's ext_proc) for gateways that route to an InferencePool; 0: off",
        parse=parse_port,
    )
    endpoint_picker_certificate: Path | None = _declare_file(
        "--endpoint-picker-cert",
        "PEM, with its chain, as --tls-cert; without it the certificate is self-signed",
    )
    endpoint_picker_key: Path | None = _declare_file(
        "--endpoint-picker-key", "PEM, without a password"
    )
    endpoint_picker_plain: bool = _declare(
        "--endpoint-picker-plain",
        False,
        "the endpoint picker serves gRPC without TLS, for proxies configured for that",
    )
    api_keys: Path | None = _declare_file(
        "--api-keys",
        "one key a line, or tenants with their keys and limits; read again when it changes; "
        "default: no authentication",
    )
    allowed_origins: tuple[str, ...] = _declare(
        "--allowed-origins",
        (),
        "origins whose pages may call the gateway from a browser (CORS), such as "
        "https://chat.example.com, or * for all; default: none",
        parse=parse_origins,
        metavar="ORIGIN,...",
    )
    allowed_hosts: tuple[str, ...] = _declare(
        "--allowed-hosts",
        (),
        "keep pages of other sites away, on a machine with browsers: requests must name one of "
        "these hosts, localhost or a loopback address, and declare bodies as JSON; those of pages "
        "must come from here or from --allowed-origins; default: any",
        parse=parse_host_names,
        metavar="HOST,...",
    )
    tls_certificate: Path | None = _declare_file(
        "--tls-cert", "PEM, with its chain: the port serves HTTPS; read again when it changes"
    )
    tls_key: Path | None = _declare_file("--tls-key", "PEM, without a password")
    fallback: FallbackPolicy = _declare(
        "--fallback",
        FallbackPolicy.ALWAYS,
        "when a request that should be split may run entirely on a decode instance",
    )
    ttft_slo_ms: float = _declare("--ttft-ms", 0.0, "target to measure; 0: none", metavar="MS")
    tpot_slo_ms: float = _declare("--tpot-ms", 0.0, "target to measure; 0: none", metavar="MS")
    itl_p99_slo_ms: float = _declare(
        "--itl-p99-ms", 0.0, "target for the P99 of gaps in streams; 0: none", metavar="MS"
    )
    sends_targets: bool = _declare(
        "--send-targets",
        False,
        "send --ttft-ms and --tpot-ms with requests to engines, whose scheduling uses them",
    )
    late_policy: LateRequestPolicy = _declare(
        "--late-requests",
        LateRequestPolicy.SERVE,
        "what happens to requests that can no longer meet --ttft-ms",
    )
    policy: DispatchPolicy = _declare(
        "--policy", DispatchPolicy.PREFIX_AWARE, "how instances are picked for a request"
    )
    session_header: str = _declare(
        "--session-header",
        "",
        "one instance computes the prompts of all requests with the same value in this header",
        metavar="NAME",
    )
    whole_below_tokens: int = _declare(
        "--short-prompt-tokens",
        0,
        "while prefill instances are busy, the decode instance computes prompts up to this "
        "length itself; 0: none; a plan's label of the workers' Service counts instead",
        metavar="TOKENS",
    )
    ahead_from_tokens: int = _declare(
        "--overlap-min-tokens",
        0,
        "KV of prompts from this length on is transferred while it is computed, by workers "
        "with --transfer auto; 0: none; a plan's label of the workers' Service counts instead",
        metavar="TOKENS",
    )
    access_log: bool = _declare("--access-log", False, "log each request, without its content")
    otlp_endpoint: str | None = _declare(
        "--otlp-endpoint",
        None,
        "collector that traces are sent to, such as http://HOST:4317 "
        "(default: as OpenTelemetry's environment variables say)",
        metavar="URL",
    )
    """Empty: from OpenTelemetry's environment variables; None: no tracing."""
    trace_sample_ratio: float = _declare(
        "--trace-share",
        0.01,
        "share of requests without a traceparent to trace, 0 to 1",
        parse=parse_ratio,
        metavar="SHARE",
    )
    flipping: FlippingMode = _declare(
        "--flipping",
        FlippingMode.OFF,
        "whether instances change roles while prompts queue or decode instances are full",
    )
    min_prefill: int = _declare("--min-prefill", 1, "prefill instances that keep their role")
    min_decode: int = _declare("--min-decode", 1, "decode instances that keep their role")
    queue_limit: int = _declare(
        "--queue-limit",
        1_024,
        "requests that wait for the first byte of their response; more are refused with 429",
        parse=parse_limit,
    )
    max_body_bytes: int = _declare(
        "--max-body", 16 << 20, "largest request body", parse=parse_size, metavar="SIZE"
    )
    max_buffered_bytes: int = _declare(
        "--max-buffered",
        64 << 20,
        "memory for requests and answers: those being received, bodies above 16 KiB being served, "
        "answers that clients do not read; beyond that, requests get 503. Half as much again is "
        "for connections",
        parse=parse_size,
        metavar="SIZE",
    )
    max_clients: int = _declare(
        "--max-clients",
        16_384,
        "open connections; beyond that, or beyond their memory, idle ones are closed",
        parse=parse_limit,
    )
    retry_share: float = _declare(
        "--retry-share",
        0.2,
        "share of a model's active requests that may be retried at a time, 0 to 1; ten always may; "
        "the others wait, --resume-timeout at most",
        parse=parse_ratio,
        metavar="SHARE",
    )
    engine_connections: int = _declare(
        "--engine-connections", 1_024, "open connections to each engine", parse=parse_limit
    )
    witness_share: float = _declare(
        "--witness-share",
        0.005,
        "share of each engine's time that canary handoffs may take, 0 to 1: they prove again and "
        "again that KV moves between every two engines; 0: none",
        parse=parse_ratio,
        metavar="SHARE",
    )
    timeouts: Timeouts = Timeouts()

    @property
    def host(self) -> str:
        """The address under which others reach this gateway; all other ports listen on it alone."""
        return self.hosts[0]


_PARSERS: dict[type, Callable[[str], Any]] = {int: parse_count, float: parse_duration}
"""Parsers by the type of the default, where the type itself would take any number."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the declared flags to `parser`."""
    for each in (*fields(GatewayConfig), *fields(Timeouts)):
        if each.metadata:
            _add_option(parser, each)


def build_config(agents: str, options: argparse.Namespace) -> GatewayConfig:
    """The configuration that parsed flags state. Raises ValueError when they contradict."""
    values = vars(options)
    timeouts = Timeouts(**_select_values(Timeouts, values))
    config = GatewayConfig(agents, **_select_values(GatewayConfig, values), timeouts=timeouts)
    _check(config)
    return config


def _add_option(parser: argparse.ArgumentParser, declared: Field[Any]) -> None:
    option, name, default = declared.metadata, declared.name, declared.default
    flag, text, metavar = option["flag"], option["help"], option["metavar"]
    if isinstance(default, bool):
        parser.add_argument(flag, dest=name, action="store_true", help=text)
        return
    if isinstance(default, Enum):
        metavar = "{" + ",".join(each.value for each in type(default)) + "}"
    kind = str if default is None else type(default)
    parse = option["parse"] or _PARSERS.get(kind, kind)
    if isinstance(default, Enum):
        parse = partial(_parse_choice, type(default))
    if default not in (None, "", 0) and "default" not in text:
        text = f"{text} (default {_format_default(default)})"
    parser.add_argument(flag, dest=name, type=parse, default=default, metavar=metavar, help=text)


def _format_default(default: object) -> str:
    """A default as a user would write it."""
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, int) and default >= 1 << 20:
        return f"{default >> 20}MiB"
    return str(default)


def _select_values(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.metadata}


def _check(config: GatewayConfig) -> None:
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both or neither")
    if (config.endpoint_picker_certificate is None) != (config.endpoint_picker_key is None):
        raise ValueError("--endpoint-picker-cert and -key go together: give both or neither")
    if config.endpoint_picker_plain and config.endpoint_picker_certificate:
        raise ValueError("--endpoint-picker-plain: has no certificates: leave out one of them")
    if config.router_port and None in (
        config.router_certificate,
        config.router_key,
        config.router_client_ca,
    ):
        raise ValueError(
            f"--router-port {config.router_port}: gives the keys of engines to its callers, which "
            "must show a certificate: give --router-cert, --router-key and --router-client-ca"
        )
    if config.max_buffered_bytes < config.max_body_bytes:
        raise ValueError(
            f"--max-buffered {config.max_buffered_bytes} is below --max-body "
            f"{config.max_body_bytes}: no body of that size could be received"
        )
    if config.sends_targets and not (config.ttft_slo_ms and config.tpot_slo_ms):
        raise ValueError("--send-targets needs --ttft-ms and --tpot-ms: give both")
    if not 1 <= config.processes <= MAX_PROCESSES:
        raise ValueError(f"--processes must be 1 to {MAX_PROCESSES}: give at most one a core")
