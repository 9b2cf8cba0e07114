"""Configuration of a gateway. Built from the command line, read by the whole package."""

from dataclasses import dataclass
from pathlib import Path

from cleave.api.enums import DispatchPolicy, FallbackPolicy, FlippingMode, LateRequestPolicy


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of all waits, in seconds."""

    connect_s: float = 2.0
    """TCP connection to an engine."""
    first_byte_s: float = 120.0
    """Prefill, and the first token of a stream; includes queueing in the engine."""
    response_s: float = 600.0
    """A response that is not streamed: its first byte comes with its last token."""
    idle_s: float = 60.0
    """Between two pieces of a stream, of a request, or of what a client reads."""
    keep_alive_s: float = 75.0
    """A client's connection without a request."""
    shutdown_delay_s: float = 0.0
    """After SIGTERM, until new connections are refused: as long as all nodes need to stop sending
    them here. Until then the gateway serves them and reports that it is draining."""
    wake_s: float = 0.0
    """A request, until an instance of its model can take it; 0: it is refused at once."""
    resume_s: float = 30.0
    """A stream whose engine was lost, until an instance can continue it."""
    drain_s: float = 30.0
    """Requests that still run when the gateway stops."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of one gateway."""

    agents: str
    """Where to find the agents, in the form that cleave.rpc.agent_discovery reads."""
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses of the port and the internal port; the first one is this gateway's own."""
    port: int = 8080
    """0: any free port, written to the log."""
    processes: int = 1
    """Processes that serve the port together."""
    internal_port: int = 0
    """/fleet, /health, /metrics and /livez without keys, for the operator and scrapers; 0: off."""
    router_port: int = 0
    """gRPC Router service; 0: off."""
    endpoint_picker_port: int = 0
    """Endpoint picker for gateways of an InferencePool, over gRPC; 0: off."""
    endpoint_picker_direct: bool = False
    """Whether it sends requests that are not split directly to instances."""
    endpoint_picker_certificate: Path | None = None
    """PEM, with its chain; read again with its key when they change. None: it is self-signed."""
    endpoint_picker_key: Path | None = None
    endpoint_picker_plain: bool = False
    """Whether it speaks gRPC without TLS."""
    api_keys: Path | None = None
    """Read again when it changes."""
    tls_certificate: Path | None = None
    """PEM, with its chain; read again with its key when they change. None: plain HTTP."""
    tls_key: Path | None = None
    fallback: FallbackPolicy = FallbackPolicy.ALWAYS
    policy: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT
    """How instances are picked for a request."""
    session_header: str = ""
    """Requests with the same value in it get their prompts computed by one instance; empty: off."""
    output_length_model: Path | None = None
    """A trained classifier of output lengths, used if it predicts better than the online
    statistics; None: there is none."""
    whole_below_tokens: int = 0
    """While prefill instances are busy, prompts up to this length are computed by the decode
    instance; 0: none are."""
    ahead_from_tokens: int = 0
    """KV of prompts from this length on is transferred while it is computed, by workers with
    `--transfer auto`; 0: none is."""
    flipping: FlippingMode = FlippingMode.OFF
    """Whether this gateway changes roles of instances as traffic changes."""
    min_prefill: int = 1
    """Prefill instances that keep their role."""
    min_decode: int = 1
    ttft_slo_ms: float = 0.0
    """Target of the deployment; 0: none, and then nothing is measured against targets."""
    tpot_slo_ms: float = 0.0
    late_policy: LateRequestPolicy = LateRequestPolicy.SERVE
    """What happens to requests that can no longer meet the TTFT target."""
    access_log: bool = False
    """Whether each request is logged."""
    otlp_endpoint: str | None = None
    """Collector of traces; empty: from OpenTelemetry's environment variables; None: no tracing."""
    trace_sample_ratio: float = 0.01
    """Share of requests to trace among those without a client's sampling decision, 0 to 1."""
    queue_limit: int = 1_024
    """Requests that wait for the first byte of their response; more are refused with 429."""
    max_body_bytes: int = 16 << 20
    max_partial_bytes: int = 64 << 20
    """Memory for incompletely received requests of all clients; more are refused with 503."""
    max_clients: int = 16_384
    """Open client connections; beyond that, idle ones are closed."""
    engine_connections: int = 1_024
    """Open connections to one engine."""
    timeouts: Timeouts = Timeouts()

    @property
    def host(self) -> str:
        """The address under which others reach this gateway; all other ports listen on it alone."""
        return self.hosts[0]
