"""LLMDeployment: what a user asks for. Read by the planner and the pod builders.

The CRD and `kubectl explain` come from these classes. A field is here only when the present system
acts on it: one that is accepted and ignored would be a promise broken in silence.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cleave.api.engine import DeletionPolicy, Engine, Template
from cleave.api.enums import DispatchPolicy
from cleave.api.model import ModelField
from cleave.api.observed import (
    LatencyCorrection,
    PastPlan,
    PlanBasis,
    SeenPrediction,
    SeenTraffic,
)
from cleave.api.planned import ManualPool, SelectedPlan
from cleave.api.planning import Mode, Planning
from cleave.api.pools import Pools
from cleave.api.resource import DNS_NAME, Conditions, Resource, name_rule
from cleave.api.role import Role
from cleave.api.scaling import Scaling
from cleave.api.shape import Rule, Shape, keyed_by
from cleave.api.workload import Workload

KIND = "LLMDeployment"


class Slo(Shape):
    """Latency targets, and the share of requests that must meet both."""

    ttft_ms: Annotated[float, Field(gt=0)]
    """Time to first token, queueing included, in milliseconds."""
    tpot_ms: Annotated[float, Field(gt=0)]
    """Time per output token after the first, in milliseconds."""
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of requests that must meet both targets."""

    @property
    def like_seconds(self) -> dict[str, float]:
        """Targets by field that are so short that seconds were probably meant, in milliseconds."""
        short = {"ttftMs": (self.ttft_ms, 10.0), "tpotMs": (self.tpot_ms, 1.0)}
        return {field: value for field, (value, least) in short.items() if value < least}


class ManualPlacement(Shape):
    """Instances per role."""

    manual: Annotated[
        list[ManualPool],
        Field(min_length=1, max_length=3),
        keyed_by("role"),
    ]
    """One entry per role."""

    rules = (
        Rule(
            cel="self.manual.all(p, self.manual.exists_one(q, q.role == p.role))",
            holds=lambda p: len({pool.role for pool in p.manual}) == len(p.manual),
            message="must not name a role twice",
            field="manual",
        ),
        Rule(
            cel="self.manual.exists(p, p.role != 'prefill')",
            holds=lambda p: any(pool.role is not Role.PREFILL for pool in p.manual),
            message="prefill instances need decode or mixed instances to hand their requests to",
            field="manual",
        ),
        Rule(
            cel="!self.manual.exists(p, has(p.perCell)) || "
            "['prefill', 'decode'].all(r, self.manual.exists(p, p.role == r && has(p.perCell))) && "
            "self.manual.all(p, !has(p.perCell) || self.manual.all(q, !has(q.perCell) || "
            "p.replicas * q.perCell == q.replicas * p.perCell && "
            "p.parallelism.pipeline == q.parallelism.pipeline))",
            holds=lambda p: _cells_match([pool for pool in p.manual if pool.per_cell]),
            message="perCell needs prefill and decode instances that both state it, in equally "
            "many cells and with the same pipeline size",
            field="manual",
        ),
    )


def _cells_match(pools: list[ManualPool]) -> bool:
    """Whether pools in cells make whole cells; no pools do."""
    if not pools:
        return True
    # Roles are checked by a rule of their own: a mixed one here is its fault.
    roles = {pool.role for pool in pools} | {Role.MIXED}
    cells = {(pool.replicas / (pool.per_cell or 1), pool.parallelism.pipeline) for pool in pools}
    return roles == set(Role) and len(cells) == 1


class Fallback(StrEnum):
    """When one instance may do both phases of a request that is meant to be split."""

    ALWAYS = "Always"
    NEVER = "Never"
    ON_PREFILL_LOSS = "OnPrefillLoss"


class Late(StrEnum):
    """What becomes of requests that cannot meet their TTFT target any more."""

    SERVE = "Serve"
    REFUSE = "Refuse"


class Routing(Shape):
    """How the gateway sends requests to instances."""

    policy: Annotated[DispatchPolicy, Field(strict=False)] = DispatchPolicy.SHORTEST_WAIT
    """Which instances a request gets. ShortestWait: prompts where the queue is predicted to be
    through first, decoding where the fewest tokens are held. PendingTokens: the fewest tokens that
    wait or are held. PrefixAware: the same less what is cached there already. LeastRequests: the
    shortest queue. PowerOfTwo: the less pending of two drawn ones. RoundRobin, Random: whatever
    they carry. LeastHeavy: decoding at the fewest long answers by short ones, where there is room.
    BestFit: decoding at the fullest instance that keeps the SLO, so that fewer are in use."""
    session_header: (
        Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")] | None
    ) = None
    """Prompts of requests with the same value in this HTTP header go to the same instance, unless
    that makes them wait longer than computing them elsewhere takes; absent: none do."""
    lengths_config_map: Annotated[str, Field(max_length=253, pattern=DNS_NAME)] | None = None
    """ConfigMap whose entry `lengths.json` was made by `cleave lengths train`: foretells how long
    answers will be, where it was found better than the mean by prompt length that gateways learn.
    Absent: they go by that mean."""
    fallback: Annotated[Fallback, Field(strict=False)] = Fallback.ALWAYS
    """When a decode instance also computes the prompt. Always: whenever no prefill instance can.
    OnPrefillLoss: only after a prefill instance failed the request. Never: answer 503 instead."""
    late: Annotated[Late, Field(strict=False)] = Late.SERVE
    """A request whose first token cannot come within slo.ttftMs any more, because of what waits
    before it. Serve: it waits. Refuse: 429 at once with Retry-After. A tenant may say otherwise."""
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that wait for their first byte in one gateway; more are answered with 429."""


class Rollout(Shape):
    """How instances are replaced and added, in a cluster. A whole role's instances are counted."""

    max_surge: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Instances of a role above the wanted number while they are replaced."""
    max_unavailable: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Instances of a role that may be missing while they are replaced."""
    pending_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 120
    """Seconds after which an instance that no node has room for is given up; it is tried again when
    nodes change, and now and then."""

    rules = (
        Rule(
            # The API server checks the default of `rollout`, which is empty, before it fills it in.
            cel="!has(self.maxSurge) || self.maxSurge + self.maxUnavailable > 0",
            holds=lambda r: r.max_surge + r.max_unavailable > 0,
            message="and maxUnavailable must not both be 0: nothing could be replaced",
            field="maxSurge",
        ),
    )


class Tracing(Shape):
    """Where the gateway sends traces."""

    endpoint: Annotated[str, Field(max_length=1024, pattern=r"^https?://[^/ \n]+")]
    """URL of an OpenTelemetry collector, such as http://collector.observability:4317 (gRPC)."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Of requests that bring no traceparent, those that are traced."""


SecretName = Annotated[str, Field(max_length=253, pattern=DNS_NAME)]


class Gateway(Shape):
    """The gateway's pods, in a cluster."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 2
    """Pods; each takes any request."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """In each pod: they serve its port together and know of each other's load; each uses a core."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Container image; absent: Cleave's own."""
    keys_secret: SecretName | None = None
    """Secret whose entry `keys` has the API keys that are let in, one a line; absent: all are."""
    tls_secret: SecretName | None = None
    """Secret of type kubernetes.io/tls: the Service then speaks HTTPS on port 443 instead of HTTP
    on port 80; a renewed certificate is taken up. Absent: plain HTTP."""
    tracing: Tracing | None = None
    """Traces of requests, through prefill and hand-off to decode; absent: none."""
    access_log: bool = False
    """Whether each request is a line in the gateway's log, without anything that it says."""
    endpoint_picker: bool = False
    """Whether the Service also offers an endpoint picker for InferencePools of the Gateway API
    Inference Extension, on port 9002; the pool's endpoints are the gateway's pods."""
    endpoint_picker_tls_secret: SecretName | None = None
    """Secret of type kubernetes.io/tls that the endpoint picker shows proxies; a renewed
    certificate is taken up. Absent: it signs one of its own, which proxies do not check unless they
    are told to."""
    endpoint_picker_plain: bool = False
    """Whether the endpoint picker speaks gRPC without TLS, for proxies that are told so."""

    rules = (
        Rule(
            cel="!has(self.endpointPicker) || !self.endpointPicker || !has(self.tlsSecret)",
            holds=lambda g: not (g.endpoint_picker and g.tls_secret),
            message="cannot go with tlsSecret: proxies speak plain HTTP to what a picker names",
            field="endpointPicker",
        ),
        Rule(
            cel="!has(self.endpointPickerPlain) || !self.endpointPickerPlain"
            " || !has(self.endpointPickerTlsSecret)",
            holds=lambda g: not (g.endpoint_picker_plain and g.endpoint_picker_tls_secret),
            message="cannot go with endpointPickerTlsSecret: leave out one of them",
            field="endpointPickerPlain",
        ),
    )


class LLMDeploymentSpec(Shape):
    """What is wanted."""

    model: ModelField
    """The model: its source as text, or an object."""
    slo: Slo
    """Latency targets."""
    workload: Workload | None = None
    """Expected traffic; absent: nothing can be planned from it."""
    planning: Planning = Planning()
    """How the planner chooses."""
    placement: ManualPlacement | None = None
    """Instances per role by hand; absent: planned."""
    routing: Routing = Routing()
    """How the gateway sends requests to instances."""
    pools: Pools = Pools()
    """How pools lend each other instances."""
    engine: Engine = Engine()
    """The engine of every instance."""
    scaling: Scaling = Scaling()
    """How many instances there are between two plans, in a cluster."""
    template: Template = Template()
    """Overrides for worker pods."""
    gateway: Gateway = Gateway()
    """The gateway's pods, in a cluster."""
    rollout: Rollout = Rollout()
    """How instances are replaced and added, in a cluster."""
    paused: bool = False
    """Whether changes wait: nothing is planned, rolled out or scaled. Lost pods are replaced."""
    deletion_policy: Annotated[DeletionPolicy, Field(strict=False)] = DeletionPolicy.DRAIN
    """What happens to running requests when the deployment is deleted. Drain: they end first,
    within template.drainTimeoutS. Immediate: they are cut."""

    rules = (
        Rule(
            cel="self.planning.mode != 'Manual' || has(self.placement)",
            holds=lambda s: s.planning.mode is not Mode.MANUAL or s.placement is not None,
            message="Manual plans nothing: state spec.placement.manual, or use mode Auto",
            field="planning.mode",
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.roles) || "
            "size(self.scaling.roles) == 0 || !has(self.placement)",
            holds=lambda s: not s.scaling.roles or s.placement is None,
            message="follow the rate by the plan's own figures: remove spec.placement, or scale by "
            "hand or by an autoscaler",
            field="scaling.roles",
        ),
        Rule(
            cel="self.routing.fallback != 'Never' || !has(self.placement) || "
            "self.placement.manual.exists(p, p.role != 'decode')",
            holds=lambda s: (
                s.routing.fallback is not Fallback.NEVER
                or s.placement is None
                or any(pool.role is not Role.DECODE for pool in s.placement.manual)
            ),
            message="Never leaves every request unserved when all instances are decode instances",
            field="routing.fallback",
        ),
    )


class RoleStatus(Shape):
    """Instances of one role."""

    role: Annotated[Role, Field(strict=False)]
    """prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=0)]
    """Instances that exist."""
    ready: Annotated[int, Field(ge=0)]
    """Instances that can take requests."""
    updated: Annotated[int, Field(ge=0)] = 0
    """Instances that are as the spec wants them."""


class LLMDeploymentStatus(Shape):
    """What is."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status speaks of."""
    rolled_out_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that was last rolled out completely: all its instances and gateways
    were ready, and none of an earlier spec were left. Absent: none was yet."""
    conditions: Conditions = Field(default_factory=list)
    """Ready: requests are served, and the generation in observedGeneration is rolled out.
    Available: requests are served, also by instances of an earlier generation. Progressing: a
    plan is being made, a roll-out is under way, or instances start or end. Degraded: fewer
    instances are ready than there should be, or something keeps failing. ScalingLimited: nodes have
    no room for all instances. PrefillReady, DecodeReady, MixedReady: an instance of the role is
    ready. GatewayReady: a gateway is ready. KVPathVerified: every ready instance has handed over KV
    in a test. PlanReady: a plan, or what spec.placement states, is in force. PlanFeasible: the
    latency targets can be met. PlanDrifted: traffic is not what was planned for. PredictionHolds:
    instances are as fast as the plan predicts."""
    model: str | None = None
    """Name that clients ask for. A changed name is shown once it is rolled out."""
    plan: SelectedPlan | None = None
    """The placement in force."""
    advice: SelectedPlan | None = None
    """The plan that would be applied, with planning.mode or planning.replan.mode Advisory."""
    observed: SeenTraffic | None = None
    """The traffic of late; absent: not known."""
    prediction: SeenPrediction | None = None
    """What the planner predicts for it; absent: it has not been compared yet."""
    correction: LatencyCorrection | None = None
    """By what the planner's latency model is corrected, as was measured; absent: not at all."""
    basis: PlanBasis | None = None
    """What the plan rests on instead of the spec; absent: on the spec."""
    plans: list[PastPlan] = Field(default_factory=list, max_length=10)
    """What became of the last looks at whether the plan is still right, the latest first."""
    roles: Annotated[list[RoleStatus], keyed_by("role")] = Field(default_factory=list)
    """Instances, by role."""
    url: str | None = None
    """Base URL for OpenAI clients inside the cluster."""


class LLMDeployment(Resource):
    """Serves one large language model from prefill, decode and mixed instances."""

    kind: Literal["LLMDeployment"] = "LLMDeployment"
    spec: LLMDeploymentSpec
    """What is wanted."""
    status: LLMDeploymentStatus | None = None
    """What is."""

    rules = (name_rule(40),)
