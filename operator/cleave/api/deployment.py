"""LLMDeployment: the resource that a user creates. Read by the planner and the manifest builders.

The CRD and `kubectl explain` are generated from these classes. A field exists only when the present
system acts on it: users would rely on a field that is accepted and ignored.
"""

import math
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cleave.api import replan_status
from cleave.api.adapters import AdapterList
from cleave.api.base import ApiModel, ValidationRule, build_unique_rule, declare_list_map_key
from cleave.api.engine import DeploymentEngine, EngineRoles, ImageName, RoleEngine
from cleave.api.enums import (
    ORIGIN,
    DispatchPolicy,
    FallbackPolicy,
    FlippingMode,
    LateRequestPolicy,
)
from cleave.api.loaded_weights import LoadedWeights
from cleave.api.model import ModelField, ModelName
from cleave.api.model_report import ReportedModel
from cleave.api.plan import ManualPool, SelectedPlan
from cleave.api.planning import Planning, PlanningMode
from cleave.api.pods.names import DNS_NAME
from cleave.api.pods.worker_template import DeletionPolicy, WorkerTemplate
from cleave.api.resource import Conditions, Resource, build_name_rule
from cleave.api.role import Role
from cleave.api.scaling import Scaling
from cleave.api.workload import Workload

KIND = "LLMDeployment"


def _is_above_attainment(name: str, slo: "Slo") -> bool:
    share: float | None = getattr(slo, name)
    return share is None or share > slo.attainment


def _list_shares(name: str, slo: "Slo") -> list[str]:
    return [f"{getattr(slo, name):g} <= {slo.attainment:g}"]


class Slo(ApiModel):
    """Latency targets, and the shares of requests that must meet them."""

    ttft_ms: Annotated[float, Field(gt=0)]
    """Target for the time to first token (TTFT) in milliseconds, including queueing."""
    tpot_ms: Annotated[float, Field(gt=0)]
    """Target for the time per output token (TPOT) after the first one, in milliseconds."""
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of requests that must meet both targets."""
    ttft_attainment: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of requests that must meet ttftMs, if above attainment; absent: attainment."""
    tpot_attainment: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of requests that must meet tpotMs, if above attainment; absent: attainment. 0.99 makes
    tpotMs a target for the 99th percentile of TPOT."""
    itl_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Target for the 99th percentile of all times between two tokens (inter-token latency, ITL) in
    milliseconds. TPOT is a request's mean of them, which hides stalls behind other prompts."""

    rules = tuple(
        ValidationRule(
            cel=f"!has(self.{field}) || self.{field} > self.attainment",
            is_valid=partial(_is_above_attainment, name),
            message="must be above attainment, for who meets both targets meets each: raise it, "
            "lower attainment, or remove it",
            field=field,
            list_offenders=partial(_list_shares, name),
        )
        for field, name in (
            ("ttftAttainment", "ttft_attainment"),
            ("tpotAttainment", "tpot_attainment"),
        )
    )

    def is_met(self, both: float, ttft: float, tpot: float, itl_p99_ms: float) -> bool:
        """Whether these shares of requests, and that percentile of gaps, meet all targets."""
        is_even = itl_p99_ms <= (self.itl_p99_ms or math.inf)
        has_own = ttft >= (self.ttft_attainment or 0.0) and tpot >= (self.tpot_attainment or 0.0)
        return is_even and has_own and both >= self.attainment

    @property
    def suspicious_targets(self) -> dict[str, float]:
        """Targets by field, in milliseconds, that are so short that seconds were probably meant."""
        itl = (self.itl_p99_ms or math.inf, 1.0)
        short = {"ttftMs": (self.ttft_ms, 10.0), "tpotMs": (self.tpot_ms, 1.0), "itlP99Ms": itl}
        return {field: value for field, (value, least) in short.items() if value < least}


class ManualPlacement(ApiModel):
    """A manual placement: the instances of each role."""

    manual: Annotated[list[ManualPool], declare_list_map_key("role", min_length=1, max_length=3)]
    """The instances of each role, one entry per role."""

    rules = (
        build_unique_rule("manual", "role", "role"),
        ValidationRule(
            cel="self.manual.exists(p, p.role != 'prefill')",
            is_valid=lambda p: any(pool.role is not Role.PREFILL for pool in p.manual),
            message="prefill instances need decode or mixed instances to hand their requests to",
            field="manual",
        ),
        ValidationRule(
            cel="!self.manual.exists(p, has(p.perCell)) || "
            "['prefill', 'decode'].all(r, self.manual.exists(p, p.role == r && has(p.perCell))) && "
            "self.manual.all(p, !has(p.perCell) || self.manual.all(q, !has(q.perCell) || "
            "p.replicas * q.perCell == q.replicas * p.perCell && "
            "p.parallelism.pipeline == q.parallelism.pipeline))",
            is_valid=lambda p: _are_cells_complete([pool for pool in p.manual if pool.per_cell]),
            message="perCell needs prefill and decode instances that both state it, in equally "
            "many cells and with the same pipeline size",
            field="manual",
        ),
    )


def _are_cells_complete(pools: list[ManualPool]) -> bool:
    """Whether the pools make complete cells; also True without pools."""
    if not pools:
        return True
    # Roles have a rule of their own, which reports a mixed one.
    roles = {pool.role for pool in pools} | {Role.MIXED}
    cells = {(pool.replicas / (pool.per_cell or 1), pool.parallelism.pipeline) for pool in pools}
    return roles == set(Role) and len(cells) == 1


class PoolsSpec(ApiModel):
    """How the prefill and decode pools exchange instances; mixed pools stay as they are."""

    flipping: Annotated[FlippingMode, Field(strict=False)] = FlippingMode.AUTO
    """Auto: while prompts wait for longer than slo.ttftMs, or decode instances are full, an
    instance of the other pool serves both roles; it returns to its own role when the load has
    fallen. No instance restarts and no request is moved. Advisory: the gateway logs and counts the
    changes that Auto would make. Off: no instance changes its role, and those that have return
    within minutes."""
    min_prefill: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Minimum number of prefill instances that always keep their role."""
    min_decode: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Minimum number of decode instances that always keep their role."""


class Routing(ApiModel):
    """How the gateway routes requests to instances."""

    policy: Annotated[DispatchPolicy, Field(strict=False)] = DispatchPolicy.PREFIX_AWARE
    """How instances are selected for a request. PrefixAware: prefill where the queue is predicted
    to drain first, where prompts repeat that and computing what the instance's prefix cache lacks;
    decode where the fewest KV tokens are held. ShortestWait: the same without looking at prompts.
    PendingTokens: the fewest tokens that are queued or held. LeastRequests: the fewest requests.
    PowerOfTwo: the less loaded of two random instances. RoundRobin and Random ignore the load.
    LeastHeavy: decode where the ratio of long to short outputs is lowest and memory suffices.
    BestFit: decode at the fullest instance that still meets the SLO, so that fewer instances are
    used."""
    session_header: (
        Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")] | None
    ) = None
    """HTTP header for session affinity: prompts of requests with the same value are sent to the
    same instance, unless they would wait longer there than another instance needs to compute them.
    Absent: no session affinity."""
    fallback: Annotated[FallbackPolicy, Field(strict=False)] = FallbackPolicy.ALWAYS
    """When a decode instance also computes the prompt. Always: whenever no prefill instance is
    available. OnPrefillLoss: only after a prefill instance failed during the request. Never: the
    gateway answers 503 instead."""
    late: Annotated[LateRequestPolicy, Field(strict=False)] = LateRequestPolicy.SERVE
    """What happens to a request whose first token is predicted to miss slo.ttftMs because of the
    queue. Serve: it is queued all the same. Refuse: it is answered with 429 and Retry-After at
    once. A tenant's settings may override this."""
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Maximum number of requests in one gateway that wait for their first byte; others get 429."""


class Rollout(ApiModel):
    """How instances are replaced in a cluster. Limits apply to each role as a whole."""

    max_surge: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Maximum number of instances of a role above its replicas during a rollout."""
    max_unavailable: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Maximum number of instances of a role that may be missing during a rollout."""
    pending_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 120
    """Seconds after which an instance that fits on no node is deleted. It is created again when
    nodes change, and periodically."""

    rules = (
        ValidationRule(
            # The API server checks the empty default of `rollout` before it fills in defaults.
            cel="!has(self.maxSurge) || self.maxSurge + self.maxUnavailable > 0",
            is_valid=lambda r: r.max_surge + r.max_unavailable > 0,
            message="and maxUnavailable must not both be 0: nothing could be replaced",
            field="maxSurge",
        ),
    )


class TracingSpec(ApiModel):
    """Where the gateway sends traces."""

    endpoint: Annotated[str, Field(max_length=1024, pattern=r"^https?://[^/ \n]+")]
    """URL of an OpenTelemetry collector (gRPC), such as http://collector.observability:4317."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests without a traceparent header that are traced."""


class CorsSpec(ApiModel):
    """Which pages in browsers may call the gateway (cross-origin resource sharing)."""

    allowed_origins: Annotated[
        list[Annotated[str, Field(max_length=253, pattern=ORIGIN)]],
        Field(min_length=1, max_length=64),
    ]
    """Origins such as https://chat.example.com, compared as a whole; `*`: all."""


SecretName = Annotated[str, Field(max_length=253, pattern=DNS_NAME)]


class GatewaySpec(ApiModel):
    """The gateway's pods in a cluster."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of gateway pods. Each of them can serve every request. `kubectl scale llmd` and
    autoscalers change it."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes in each gateway pod, with one port and load account; each uses up to a core."""
    image: ImageName | None = None
    """Container image of the gateway; absent: Cleave's own."""
    model_aliases: list[ModelName] = Field(default_factory=list, max_length=64)
    """Further names of the model in requests. /v1/models lists them, and a response has the name of
    its request. A change replaces no engine."""
    keys_secret: SecretName | None = None
    """Secret whose entry `keys` lists the accepted API keys, one per line; absent: no keys."""
    tls_secret: SecretName | None = None
    """Name of a Secret of type kubernetes.io/tls. The Service then serves HTTPS on port 443 instead
    of HTTP on port 80; a renewed certificate is loaded without a restart. Absent: plain HTTP."""
    cors: CorsSpec | None = None
    """Whose pages may call the gateway from a browser; absent: only pages of its own origin."""
    tracing: TracingSpec | None = None
    """Tracing of requests through prefill, KV transfer and decode; absent: no traces."""
    access_log: bool = False
    """Whether the gateway logs a line for each request. Prompts and outputs are never logged."""
    endpoint_picker: bool = False
    """Whether the Service also offers an endpoint picker for InferencePools of the Gateway API
    Inference Extension, on port 9002. The endpoints of the InferencePool are the gateway's pods."""
    endpoint_picker_tls_secret: SecretName | None = None
    """Name of a Secret of type kubernetes.io/tls with the endpoint picker's certificate; a renewed
    certificate is loaded without a restart. Absent: the picker uses a self-signed certificate,
    which proxies accept unless they are configured to verify it."""
    endpoint_picker_plain: bool = False
    """Whether the endpoint picker serves gRPC without TLS, for proxies configured for it."""
    router_tls_secret: SecretName | None = None
    """Name of a Secret of type kubernetes.io/tls whose entry `ca.crt` is the authority of callers.
    The Service then offers the gRPC service cleave.rpc.v1.Router on port 9003, which gives the keys
    of engines to callers with a certificate of that authority and to no other. Absent: no port."""

    rules = (
        ValidationRule(
            cel="!has(self.endpointPicker) || !self.endpointPicker || !has(self.tlsSecret)",
            is_valid=lambda g: not (g.endpoint_picker and g.tls_secret),
            message="cannot go with tlsSecret: proxies speak plain HTTP to what a picker names",
            field="endpointPicker",
        ),
        ValidationRule(
            cel="!has(self.endpointPickerPlain) || !self.endpointPickerPlain"
            " || !has(self.endpointPickerTlsSecret)",
            is_valid=lambda g: not (g.endpoint_picker_plain and g.endpoint_picker_tls_secret),
            message="cannot go with endpointPickerTlsSecret: leave out one of them",
            field="endpointPickerPlain",
        ),
    )


class WitnessSpec(ApiModel):
    """How the gateway proves, again and again, that KV moves between every two engines."""

    engine_share: Annotated[float, Field(ge=0, le=0.1)] = 0.005
    """Share of each engine's time that canary handoffs may take; 0: there are none."""


class LLMDeploymentSpec(ApiModel):
    """Desired state of the deployment."""

    model: ModelField
    """The model to serve: its source as text, or an object."""
    slo: Slo
    """Latency targets that the planner and the gateway work towards."""
    workload: Workload | None = None
    """Expected traffic; absent: the planner has nothing to plan for."""
    planning: Planning = Planning()
    """How the planner chooses a plan."""
    placement: ManualPlacement | None = None
    """Manual placement: the instances of each role; absent: they are planned."""
    routing: Routing = Routing()
    """How the gateway routes requests to instances."""
    pools: PoolsSpec = PoolsSpec()
    """How the prefill and decode pools exchange instances while traffic changes."""
    engine: DeploymentEngine = DeploymentEngine()
    """The inference engine of every instance."""
    adapters: AdapterList = Field(default_factory=list)
    """LoRA adapters of the model. Running engines load and unload them as this list changes, with
    neither a restart nor a rollout; engine.args must have --enable-lora, and sets limits such as
    --max-loras and --max-lora-rank. A changed source takes the requests of its name once it is
    loaded; requests that run are finished with the previous one."""
    scaling: Scaling = Scaling()
    """How the number of instances follows traffic between two plans, in a cluster."""
    template: WorkerTemplate = WorkerTemplate()
    """Overrides for the worker pods."""
    gateway: GatewaySpec = GatewaySpec()
    """The gateway's pods in a cluster."""
    # Without a default in the CRD, which the API server would write into each object: after a
    # roll-back an operator of an earlier version would refuse it.
    witness: Annotated[WitnessSpec, Field(json_schema_extra={"default": None})] = WitnessSpec()
    """How the gateway proves, again and again, that KV moves between every two engines."""
    rollout: Rollout = Rollout()
    """How instances are replaced in a cluster."""
    paused: bool = False
    """Whether changes wait: no planning, rollout or scaling. Lost pods are still replaced."""
    deletion_policy: Annotated[DeletionPolicy, Field(strict=False)] = DeletionPolicy.DRAIN
    """What happens to running requests when the deployment is deleted. Drain: they are finished
    first, within template.drainTimeoutS. Immediate: they are aborted."""

    rules = (
        ValidationRule(
            cel="self.planning.mode != 'Manual' || has(self.placement)",
            is_valid=lambda s: s.placement or s.planning.mode is not PlanningMode.MANUAL,
            message="Manual plans nothing: state spec.placement.manual, or use mode Auto",
            field="planning.mode",
        ),
        ValidationRule(
            cel="!has(self.scaling) || !has(self.scaling.roles) || "
            "size(self.scaling.roles) == 0 || !has(self.placement)",
            is_valid=lambda s: not s.scaling.roles or s.placement is None,
            message="follow the rate by the plan's own figures: remove spec.placement, or scale by "
            "hand or by an autoscaler",
            field="scaling.roles",
        ),
        ValidationRule(
            cel="self.routing.fallback != 'Never' || !has(self.placement) || "
            "self.placement.manual.exists(p, p.role != 'decode')",
            is_valid=lambda s: (
                s.routing.fallback is not FallbackPolicy.NEVER
                or s.placement is None
                or any(pool.role is not Role.DECODE for pool in s.placement.manual)
            ),
            message="Never leaves every request unserved when all instances are decode instances",
            field="routing.fallback",
        ),
        ValidationRule(
            cel="!has(self.adapters) || size(self.adapters) == 0 || has(self.engine) && "
            "has(self.engine.args) && self.engine.args.exists(a, "
            "a.replace('_', '-') == '--enable-lora')",
            is_valid=lambda s: not s.adapters or s.engine.enables_lora,
            message="need --enable-lora in engine.args",
            field="adapters",
        ),
        ValidationRule(
            cel="!has(self.adapters) || size(self.adapters) == 0 || !has(self.engine) || "
            "!has(self.engine.args) || !self.engine.args.exists(a, "
            "a.split('=')[0].replace('_', '-') == '--lora-modules')",
            is_valid=lambda s: not (s.adapters and s.engine.has_flag("--lora-modules")),
            message="exclude --lora-modules in engine.args: list all adapters here",
            field="adapters",
        ),
        build_unique_rule("adapters", "name", "LoRA adapter"),
        ValidationRule(
            cel="!has(self.placement) || !has(self.engine) || !has(self.engine.roles) || "
            "!self.placement.manual.exists(p, has(p.args) || has(p.env))",
            is_valid=lambda s: not (s.engine.roles and any(p.sets_engine for p in s.manual_pools)),
            message="exclude args and env in spec.placement.manual: write those of all roles into "
            "one of the two",
            field="engine.roles",
        ),
    )

    @model_validator(mode="after")
    def _read_pool_engines(self) -> Self:
        """Read what manual pools state for their engines into `engine.roles`."""
        own = {
            str(pool.role): RoleEngine(args=pool.args, env=pool.env)
            for pool in self.manual_pools
            if pool.sets_engine
        }
        if own:
            engine = self.engine.model_copy(update={"roles": EngineRoles(**own)})
            object.__setattr__(self, "engine", engine)
        return self

    @property
    def manual_pools(self) -> list[ManualPool]:
        """The pools of a manual placement; none: it is planned."""
        return self.placement.manual if self.placement else []

    @property
    def can_share_gpu_memory(self) -> bool:
        """Whether engines of one pod move KV from GPU to GPU, by CUDA IPC; parts of GPUs and claims
        are not shared. The engines of a pod have the same variables."""
        return self.template.has_whole_gpus and not self.engine.has_role_env

    @property
    def flipping(self) -> FlippingMode:
        """How running instances change roles: not at all where the roles' engines differ, as a
        running one keeps the arguments and variables of its start."""
        return self.pools.flipping if self.engine.can_change_roles else FlippingMode.OFF


class RoleStatus(ApiModel):
    """The instances of one role."""

    role: Annotated[Role, Field(strict=False)]
    """The role: prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=0)]
    """Number of instances that exist."""
    ready: Annotated[int, Field(ge=0)]
    """Number of instances that are ready to serve requests."""
    updated: Annotated[int, Field(ge=0)] = 0
    """Number of instances of the present spec."""


class LLMDeploymentStatus(ApiModel):
    """Observed state of the deployment."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    rolled_out_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that was last rolled out completely: all its instances and gateways
    were ready, and none of an earlier spec remained. Absent: no rollout has been completed yet."""
    conditions: Conditions = Field(default_factory=list)
    """Ready: requests are served, and the generation in observedGeneration is rolled out.
    Available: requests are served, possibly by instances of an earlier generation. Progressing: a
    plan is being computed, a rollout is under way, or instances start or end. Degraded: fewer
    instances are ready than desired, or something keeps failing. ScalingLimited: the nodes have no
    room for all instances, or others use GPUs that are lent. PrefillReady, DecodeReady, MixedReady:
    an instance of the role is ready. GatewayReady: a gateway is ready. KVPathVerified: every ready
    instance has transferred KV in a self-test. KVRateAsPlanned: each test measured at least a
    quarter of the rate that the plan or the nodes give. KVPathProven: the newest canary handoff
    between every two engines was good, at most ten minutes ago. PlanReady: a plan, or the placement
    in spec.placement, is in force. PlanFeasible: the latency targets can be met. PlanDrifted:
    traffic differs from the planned traffic. PredictionHolds: instances are as fast as the planner
    predicts. SLOAttained: recent requests met spec.slo; absent where the operator does not read the
    gateways' traffic. PrometheusRead: the gateways' counters come from the operator's Prometheus;
    absent where it has none. AdaptersLoaded: every ready instance has loaded spec.adapters; absent
    without any.
    ModelAsReported: all engines report the same config.json, and their KV bytes per token are those
    that plans count with; absent while no engine has reported them. WeightsAgree: all instances
    have loaded the same weights: the same content of files, or commit of a repository; absent while
    no engine has reported them."""
    model: str | None = None
    """Model name that clients request. A changed name appears once its rollout is complete."""
    plan: SelectedPlan | None = None
    """The plan or manual placement in force."""
    reported_model: ReportedModel | None = None
    """What the first ready engine says about the model, of which plans are made where Cleave knows
    it from nowhere else; absent: no engine has reported it."""
    weights: LoadedWeights | None = None
    """What the instances have loaded last; absent: nothing that they report."""
    advice: SelectedPlan | None = None
    """With planning.mode or planning.replan.mode Advisory: the plan that Auto would apply."""
    observed: replan_status.ObservedTraffic | None = None
    """Recently observed traffic; absent: not known."""
    prediction: replan_status.CurrentPrediction | None = None
    """Latencies that the planner predicts for this traffic; absent: not compared yet."""
    correction: replan_status.LatencyCorrection | None = None
    """Measured correction of the planner's latency model; absent: no correction."""
    basis: replan_status.FittedPlanInputs | None = None
    """Inputs of the plan that replace those of the spec; absent: it was made from the spec."""
    plans: list[replan_status.PastPlan] = Field(default_factory=list, max_length=10)
    """Results of the last reviews of the plan, the latest first."""
    roles: Annotated[list[RoleStatus], declare_list_map_key("role")] = Field(default_factory=list)
    """The instances of each role."""
    gateways: Annotated[int, Field(ge=0)] | None = None
    """Number of gateway pods, for autoscalers."""
    gateway_selector: str | None = None
    """Labels of the gateway pods, for autoscalers."""
    url: str | None = None
    """Base URL for OpenAI clients inside the cluster."""


class LLMDeployment(Resource):
    """An LLMDeployment serves one large language model with prefill, decode and mixed instances."""

    kind: Literal["LLMDeployment"] = "LLMDeployment"
    spec: LLMDeploymentSpec
    """Desired state of the deployment."""
    status: LLMDeploymentStatus | None = None
    """Observed state of the deployment."""

    rules = (build_name_rule(40),)
