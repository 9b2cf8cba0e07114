"""Configuration of a gateway: each option is declared here once, with its flag, default and help.

`cleave.gateway.main` builds the parser and the configuration from these declarations; pods are
started with the flags, and the reference is generated from the parser.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from cleave.api.enums import (
    ORIGIN,
    DispatchPolicy,
    FallbackPolicy,
    FlippingMode,
    LateRequestPolicy,
)
from cleave.options import (
    declare,
    declare_file,
    declare_seconds,
    parse_hosts,
    parse_limit,
    parse_names,
    parse_port,
    parse_ratio,
    parse_size,
    read_options,
)
from cleave.rpc.agent_discovery import ENV as AGENTS_ENV

MAX_PROCESSES = 64


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


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of all waits, in seconds."""

    connect_s: float = declare_seconds("--connect-timeout", 2.0, "TCP connection to an engine")
    first_byte_s: float = declare_seconds(
        "--first-byte-timeout",
        120.0,
        "prefill, and the first token of a stream; includes queueing in the engine",
    )
    response_s: float = declare_seconds(
        "--response-timeout",
        600.0,
        "a response that is not streamed: its first byte comes with its last token",
    )
    idle_s: float = declare_seconds(
        "--idle-timeout",
        60.0,
        "between two pieces of a stream, of a request, or of what a client reads",
    )
    keep_alive_s: float = 75.0
    """A client's connection without a request."""
    wake_s: float = declare_seconds(
        "--wake-timeout",
        0.0,
        "how long a request waits for an instance when none can take it; 0: it is refused at once",
    )
    resume_s: float = declare_seconds(
        "--resume-timeout",
        30.0,
        "how long a stream that lost its engine waits for another instance",
    )
    shutdown_delay_s: float = declare_seconds(
        "--shutdown-delay",
        0.0,
        "from SIGTERM until new connections are refused: as long as all nodes need to stop sending "
        "them here",
    )
    drain_s: float = declare_seconds(
        "--drain-timeout", 30.0, "requests that still run when the gateway stops"
    )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of one gateway."""

    agents: str = declare(
        "--agents",
        help_text="file:PATH, endpoints:NAMESPACE/SERVICE:PORT, dns:NAME:PORT or HOST:PORT,... "
        f"(default: ${AGENTS_ENV})",
        env=AGENTS_ENV,
    )
    deployment: str = declare(
        "--deployment", "", "the LLMDeployment whose agents are accepted; default: of any"
    )
    model_names: tuple[str, ...] = declare(
        "--model-names",
        (),
        "a model's name, and further ones by which clients may request it; default: those alone "
        "that engines have",
        parse=parse_names,
        metavar="NAME,...",
    )
    hosts: tuple[str, ...] = declare(
        "--host",
        ("127.0.0.1",),
        "addresses to listen on; the first one is the address under which others reach it",
        parse=parse_hosts,
        metavar="HOST,...",
    )
    port: int = declare("--port", 8080, "0: any free port, written to the log", parse=parse_port)
    processes: int = declare(
        "--processes",
        1,
        "processes that serve the port and share their load accounting; one for each core",
    )
    internal_port: int = declare(
        "--internal-port",
        0,
        "/fleet, /health, /metrics and /livez without keys, for the operator and scrapers; 0: off",
        parse=parse_port,
    )
    router_port: int = declare(
        "--router-port",
        0,
        "gRPC Router service, which gives the keys of engines to its callers; 0: off; needs "
        "--router-cert, --router-key and --router-client-ca",
        parse=parse_port,
    )
    router_certificate: Path | None = declare_file(
        "--router-cert", "PEM, with its chain, as --tls-cert"
    )
    router_key: Path | None = declare_file("--router-key", "PEM, without a password")
    router_client_ca: Path | None = declare_file(
        "--router-client-ca",
        "PEM: the Router service serves only callers with a certificate of this authority, which "
        "is to sign for them alone",
    )
    endpoint_picker_port: int = declare(
        "--endpoint-picker-port",
        0,
        "endpoint picker (Envoy's ext_proc) for gateways that route to an InferencePool; 0: off",
        parse=parse_port,
    )
    endpoint_picker_certificate: Path | None = declare_file(
        "--endpoint-picker-cert",
        "PEM, with its chain, as --tls-cert; without it the certificate is self-signed",
    )
    endpoint_picker_key: Path | None = declare_file(
        "--endpoint-picker-key", "PEM, without a password"
    )
    endpoint_picker_plain: bool = declare(
        "--endpoint-picker-plain",
        False,
        "the endpoint picker serves gRPC without TLS, for proxies configured for that",
    )
    api_keys: Path | None = declare_file(
        "--api-keys",
        "one key a line, or tenants with their keys and limits; read again when it changes; "
        "default: no authentication",
    )
    allowed_origins: tuple[str, ...] = declare(
        "--allowed-origins",
        (),
        "origins whose pages may call the gateway from a browser (CORS), such as "
        "https://chat.example.com, or * for all; default: none",
        parse=parse_origins,
        metavar="ORIGIN,...",
    )
    allowed_hosts: tuple[str, ...] = declare(
        "--allowed-hosts",
        (),
        "keep pages of other sites away, on a machine with browsers: requests must name one of "
        "these hosts, localhost or a loopback address, and declare bodies as JSON; those of pages "
        "must come from here or from --allowed-origins; default: any",
        parse=parse_host_names,
        metavar="HOST,...",
    )
    tls_certificate: Path | None = declare_file(
        "--tls-cert", "PEM, with its chain: the port serves HTTPS; read again when it changes"
    )
    tls_key: Path | None = declare_file("--tls-key", "PEM, without a password")
    fallback: FallbackPolicy = declare(
        "--fallback",
        FallbackPolicy.ALWAYS,
        "when a request that should be split may run entirely on a decode instance",
    )
    ttft_slo_ms: float = declare("--ttft-ms", 0.0, "target to measure; 0: none", metavar="MS")
    tpot_slo_ms: float = declare("--tpot-ms", 0.0, "target to measure; 0: none", metavar="MS")
    itl_p99_slo_ms: float = declare(
        "--itl-p99-ms", 0.0, "target for the P99 of gaps in streams; 0: none", metavar="MS"
    )
    sends_targets: bool = declare(
        "--send-targets",
        False,
        "send --ttft-ms and --tpot-ms with requests to engines, whose scheduling uses them",
    )
    late_policy: LateRequestPolicy = declare(
        "--late-requests",
        LateRequestPolicy.SERVE,
        "what happens to requests that can no longer meet --ttft-ms",
    )
    policy: DispatchPolicy = declare(
        "--policy", DispatchPolicy.PREFIX_AWARE, "how instances are picked for a request"
    )
    session_header: str = declare(
        "--session-header",
        "",
        "one instance computes the prompts of all requests with the same value in this header",
        metavar="NAME",
    )
    whole_below_tokens: int = declare(
        "--short-prompt-tokens",
        0,
        "while prefill instances are busy, the decode instance computes prompts up to this "
        "length itself; 0: none; a plan's label of the workers' Service counts instead",
        metavar="TOKENS",
    )
    ahead_from_tokens: int = declare(
        "--overlap-min-tokens",
        0,
        "KV of prompts from this length on is transferred while it is computed, by workers "
        "with --transfer auto; 0: none; a plan's label of the workers' Service counts instead",
        metavar="TOKENS",
    )
    access_log: bool = declare("--access-log", False, "log each request, without its content")
    otlp_endpoint: str | None = declare(
        "--otlp-endpoint",
        None,
        "collector that traces are sent to, such as http://HOST:4317 "
        "(default: as OpenTelemetry's environment variables say)",
        metavar="URL",
    )
    """Empty: from OpenTelemetry's environment variables; None: no tracing."""
    trace_sample_ratio: float = declare(
        "--trace-share",
        0.01,
        "share of requests without a traceparent to trace, 0 to 1",
        parse=parse_ratio,
        metavar="SHARE",
    )
    flipping: FlippingMode = declare(
        "--flipping",
        FlippingMode.OFF,
        "whether instances change roles while prompts queue or decode instances are full",
    )
    min_prefill: int = declare("--min-prefill", 1, "prefill instances that keep their role")
    min_decode: int = declare("--min-decode", 1, "decode instances that keep their role")
    queue_limit: int = declare(
        "--queue-limit",
        1_024,
        "requests that wait for the first byte of their response; more are refused with 429",
        parse=parse_limit,
    )
    max_body_bytes: int = declare(
        "--max-body", 16 << 20, "largest request body", parse=parse_size, metavar="SIZE"
    )
    max_buffered_bytes: int = declare(
        "--max-buffered",
        64 << 20,
        "memory for requests and answers: those being received, bodies above 16 KiB being served, "
        "answers that clients do not read; beyond that, requests get 503. Half as much again is "
        "for connections",
        parse=parse_size,
        metavar="SIZE",
    )
    max_clients: int = declare(
        "--max-clients",
        16_384,
        "open connections; beyond that, or beyond their memory, idle ones are closed",
        parse=parse_limit,
    )
    retry_share: float = declare(
        "--retry-share",
        0.2,
        "share of a model's active requests that may be retried at a time, 0 to 1; ten always may; "
        "the others wait, --resume-timeout at most",
        parse=parse_ratio,
        metavar="SHARE",
    )
    engine_connections: int = declare(
        "--engine-connections", 1_024, "open connections to each engine", parse=parse_limit
    )
    witness_share: float = declare(
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


def build_config(options: argparse.Namespace) -> GatewayConfig:
    """The configuration that parsed flags state. Raises ValueError when they contradict."""
    config = read_options(GatewayConfig, options, timeouts=read_options(Timeouts, options))
    _check(config)
    return config


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
