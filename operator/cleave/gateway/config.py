"""What a gateway is told at its start. Filled by the command line, read by the whole package."""

import enum
from dataclasses import dataclass
from pathlib import Path

from cleave.api.enums import DispatchPolicy
from cleave.router.pool_manager import Flipping
from cleave.router.router import Fallback


class Late(enum.Enum):
    """What becomes of a request that cannot meet its TTFT target any more."""

    SERVE = "Serve"
    REFUSE = "Refuse"
    """429 at once, so that its client can go elsewhere and others are not late as well."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds of every wait, in seconds."""

    connect_s: float = 2.0
    """TCP connection to an engine."""
    first_byte_s: float = 120.0
    """Prefill, and the first token of a stream; queueing in the engine included."""
    answer_s: float = 600.0
    """A whole answer that is not streamed: its first byte comes with its last token."""
    idle_s: float = 60.0
    """Between two pieces of a stream, of a request, or of what a client takes from us."""
    keep_alive_s: float = 75.0
    """A client's connection without a request."""
    leave_s: float = 0.0
    """After SIGTERM, until new connections are refused: as long as it takes every node to hear that
    this gateway goes. Until then it says so, and serves what still comes."""
    wake_s: float = 0.0
    """A request, until an instance of its model can take it; 0: it is refused at once."""
    resume_s: float = 30.0
    """A stream whose engine was lost, until an instance can go on with it."""
    drain_s: float = 30.0
    """After that, requests still running."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway."""

    agents: str
    """Where the agents are, as cleave.rpc.discovery reads it."""
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses that the port and the internal port listen on; the first is this gateway's own."""
    port: int = 8080
    """0: any free port, written to the log."""
    processes: int = 1
    """That serve the port together."""
    internal_port: int = 0
    """/fleet, /health, /metrics and /livez without keys, for the operator and scrapers; 0: off."""
    router_port: int = 0
    """gRPC Router service; 0: off."""
    endpoint_picker_port: int = 0
    """Endpoint picker for gateways of InferencePools, over gRPC; 0: off."""
    endpoint_picker_direct: bool = False
    """Whether it sends requests that are not split to instances, past this gateway."""
    endpoint_picker_certificate: Path | None = None
    """PEM, with its chain; with its key also read again. None: it signs one of its own."""
    endpoint_picker_key: Path | None = None
    endpoint_picker_plain: bool = False
    """Whether it speaks gRPC without TLS."""
    api_keys: Path | None = None
    """Read again whenever it changes."""
    tls_certificate: Path | None = None
    """PEM, with its chain; with its key also read again. None: the port speaks plain HTTP."""
    tls_key: Path | None = None
    fallback: Fallback = Fallback.ALWAYS
    policy: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT
    """Which instances a request gets."""
    session_header: str = ""
    """Prompts of requests with the same value in it keep to one instance; empty: none do."""
    lengths: Path | None = None
    """A trained classifier of output lengths, used where it is better than what is learnt online;
    None: there is none."""
    whole_below_tokens: int = 0
    """Prompts up to so long are computed where they are decoded while prefill is busy; 0: none."""
    ahead_from_tokens: int = 0
    """Prompts from so many on are moved while they are computed, by workers that can and leave the
    choice to others; 0: none are."""
    flipping: Flipping = Flipping.OFF
    """Whether this gateway changes roles of instances as traffic does."""
    min_prefill: int = 1
    """Prefill instances that keep their role."""
    min_decode: int = 1
    ttft_slo_ms: float = 0.0
    """Target of the deployment; 0: none, and then nothing is measured against it."""
    tpot_slo_ms: float = 0.0
    late: Late = Late.SERVE
    """What becomes of requests that cannot meet the TTFT target any more."""
    access_log: bool = False
    """Whether each request is a line in the log."""
    otlp_endpoint: str | None = None
    """Collector of traces; empty: as OpenTelemetry's environment variables say; None: no traces."""
    trace_share: float = 0.01
    """Of requests whose clients have not decided it, those that are traced."""
    queue_limit: int = 1_024
    """Requests that wait for the first byte of their answer; more are refused with 429."""
    max_body_bytes: int = 16 << 20
    max_partial_bytes: int = 64 << 20
    """Memory of requests that are not whole, of all clients; more are refused with 503."""
    max_clients: int = 16_384
    """Open client connections; for more, idle ones are closed."""
    engine_connections: int = 1_024
    """Open connections to one engine."""
    timeouts: Timeouts = Timeouts()

    @property
    def host(self) -> str:
        """The address that names this gateway to others; all other ports listen there only."""
        return self.hosts[0]
