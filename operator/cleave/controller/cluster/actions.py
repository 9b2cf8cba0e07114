"""Actions: the values that a reconcile returns and that the executor carries out."""

from dataclasses import dataclass

from cleave.api.replan_status import CurrentPrediction, FittedPlanInputs, LatencyCorrection
from cleave.api.role import Role
from cleave.manifests.labels import Manifest
from cleave.planner.plan import PlannedPool
from cleave.planner.replan.revision import ReplacedPlan, ReplanSettings, ReplanVerdict
from cleave.policy.adapters import AdapterSource
from cleave.rpc.credentials import AgentEndpoint
from cleave.traffic.window import TrafficWindow


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """One object of the cluster: by name and, where it is known, by uid."""

    kind: str
    namespace: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Apply:
    """Create or update an object by server-side apply. Fields left out stay with their owner."""

    manifest: Manifest
    is_new: bool = False
    """Whether the cache had no such object. One that exists and has another owner is then kept."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object. One of the same name that exists already is left as it is."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid, not a later one of the same name."""

    target: ObjectReference
    grace_s: int | None = None
    """Grace period in seconds, instead of the object's own; 0: at once, for pods of lost nodes."""


@dataclass(frozen=True, slots=True)
class Repurpose:
    """Change a running instance's configured role and move its pod to `pool`, without a restart.
    When the agent refuses or does not respond, pod and role stay as they are."""

    target: ObjectReference
    """The pod."""
    agent: AgentEndpoint
    """The pod's."""
    role: Role
    metadata: Manifest
    """Labels, annotations and owner reference to write; empty: they are up to date."""
    pool: ObjectReference


@dataclass(frozen=True, slots=True)
class OrderAdapters:
    """Order the LoRA adapters of a running instance. When an agent refuses or does not respond, the
    order is repeated later."""

    target: ObjectReference
    """The pod."""
    agents: tuple[AgentEndpoint, ...]
    """The pod's."""
    adapters: tuple[AdapterSource, ...]
    generation: int
    """Of the deployment."""
    deployment: ObjectReference


@dataclass(frozen=True, slots=True)
class SetLabels:
    """Set labels and annotations of a pod; others stay."""

    target: ObjectReference
    labels: dict[str, str]
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """Write the status of an object."""

    target: ObjectReference
    status: Manifest


@dataclass(frozen=True, slots=True)
class SetFinalizers:
    """Replace the finalizers, unless the object has changed since resource version `version`."""

    target: ObjectReference
    finalizers: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Record a Kubernetes Event for an object."""

    target: ObjectReference
    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class PlanReview:
    """Request to compare the running plan with observed traffic and to search for a better one."""

    at_s: float
    """Time of the request, in seconds since the epoch."""
    pools: tuple[PlannedPool, ...]
    """The pools that run."""
    algorithm: str
    """Algorithm that found the running plan."""
    windows: tuple[TrafficWindow, ...]
    """Traffic windows since the running plan was applied, oldest first."""
    settings: ReplanSettings
    past_plans: tuple[ReplacedPlan, ...] = ()
    """Plans that ran before the present one."""
    max_model_len: int | None = None
    """Longest request in tokens that the running plan set, which a new one keeps; None: the
    deployment's."""


@dataclass(frozen=True, slots=True)
class ReviewResult:
    """Result of a `PlanReview`. A better plan, if there is one, is in `PlanJob.plan`."""

    verdict: ReplanVerdict
    reason: str
    is_accurate: bool | None
    """Whether predicted and observed latencies agree; None: too little traffic."""
    accuracy_message: str
    """`is_accurate` as a sentence."""
    prediction: CurrentPrediction
    """Predicted latencies of the running plan."""
    correction: LatencyCorrection | None
    """Correction of the latency model from now on; None: no correction is needed."""


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A request to the planner and, once it has finished, its result: a plan or faults."""

    inputs_hash: str
    """Hash of everything that the plan depends on."""
    node_counts_hash: str = ""
    """Hash of the node counts by kind."""
    fitted_inputs: FittedPlanInputs | None = None
    """Observed traffic and model correction, which replace those of the spec."""
    review: PlanReview | None = None
    """Set when the running plan is to be reviewed; None: a plan is to be made from scratch."""
    model_hash: str = ""
    """Hash of what latencies depend on (model, engine, kinds of GPU)."""
    is_replan: bool = False
    """Whether the running plan was made from the same inputs, but other nodes: then its longest
    request stays if a plan with it is feasible, as another would replace every instance."""
    max_model_len: int | None = None
    """That of the running plan; None: the deployment's own."""
    plan: Manifest | None = None
    """The plan, in the form of `status.plan`."""
    faults: tuple[str, ...] = ()
    """Why the planner failed, one line each."""
    infeasible: str = ""
    """Why no plan meets the latency targets; empty: one does."""
    review_result: ReviewResult | None = None
    """Result of `review`."""

    @property
    def result(self) -> str:
        """The result in one word, for metrics."""
        if self.faults:
            return "failed"
        if self.review_result is not None:
            return str(self.review_result.verdict).lower()
        return "planned" if self.plan is not None else "infeasible"


PLAN_RESULTS = ("planned", "infeasible", "failed", *(str(each).lower() for each in ReplanVerdict))
"""The values of `PlanJob.result`."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Submit a request to the planner process; its result enqueues the deployment again."""

    job: PlanJob


@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile again after `after_s` seconds."""

    after_s: float


Write = (
    Apply
    | Create
    | Delete
    | Repurpose
    | OrderAdapters
    | SetLabels
    | PatchStatus
    | SetFinalizers
    | Emit
)
Action = Write | RequestPlan | Requeue
