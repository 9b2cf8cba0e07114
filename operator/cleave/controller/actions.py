"""What a reconcile wants done: values, made by pure decisions and carried out by the executor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.api.observed import LatencyCorrection, PlanBasis, SeenPrediction
from cleave.api.role import Role
from cleave.planner.plan import PlannedPool
from cleave.planner.revision import Left, Terms, Verdict
from cleave.pods.labels import Manifest
from cleave.traffic.window import Window


@dataclass(frozen=True, slots=True)
class Reference:
    """One object of the cluster, by name and, where it is known, by its very uid."""

    kind: str
    namespace: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make the object be so, by server-side apply; what is not stated stays another's."""

    manifest: Manifest
    is_new: bool = False
    """Whether none was seen: one that is there all the same, and is not its owner's, stays."""


@dataclass(frozen=True, slots=True)
class Create:
    """Make an object that is not there; one of that name that is there already stays as it is."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this very object, not another one of its name."""

    target: Reference
    grace_s: int | None = None
    """Grace instead of the object's own; 0: forget it at once, its node is lost."""


@dataclass(frozen=True, slots=True)
class Repurpose:
    """Give a running instance another role for good, as `pool`'s from then on; nothing restarts.

    Where its agent refuses or does not answer, the pod stays what it is.
    """

    target: Reference
    """The pod."""
    agent: str
    """Address of its agent."""
    role: Role
    metadata: Manifest
    """Labels, annotations and owner to change; empty: they are right already."""
    pool: Reference


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """Make the status be so."""

    target: Reference
    status: Manifest


@dataclass(frozen=True, slots=True)
class SetFinalizers:
    """Replace the finalizers, unless the object has changed since `version`."""

    target: Reference
    finalizers: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell people what happened to an object, as a Kubernetes Event."""

    target: Reference
    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Review:
    """A question about what runs: whether the planner is right about it, and knows better."""

    at_s: float
    """When it was asked, since the epoch."""
    pools: tuple[PlannedPool, ...]
    """What runs."""
    algorithm: str
    """How it was found."""
    windows: tuple[Window, ...]
    """What was seen of it."""
    terms: Terms
    left: tuple[Left, ...] = ()
    """What ran before."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The answer to it. A plan, where there is a better one, is the outcome's."""

    verdict: Verdict
    reason: str
    holds: bool | None
    """Whether the planner is right about what runs; None: too little was seen."""
    judged: str
    """The same in a sentence."""
    prediction: SeenPrediction
    """Of what runs."""
    correction: LatencyCorrection | None
    """Of the latency model, from now on; None: it is right as it is."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """A question to the planner and, once there is one, its answer: a plan, faults, or neither."""

    inputs: str
    """Digest of what a plan rests on."""
    numbers: str = ""
    """Digest of how many nodes there were."""
    basis: PlanBasis | None = None
    """What is planned from instead of what the spec states."""
    review: Review | None = None
    """What is asked besides; None: nothing runs yet, or it does not matter."""
    model_digest: str = ""
    """Of what latencies depend on."""
    plan: Manifest | None = None
    """The plan as `status.plan` tells it."""
    faults: tuple[str, ...] = ()
    """What is wrong with the question, one line each."""
    infeasible: str = ""
    """Why no plan holds the targets."""
    reviewed: Reviewed | None = None
    """The answer to `review`."""

    @property
    def result(self) -> str:
        """The answer in a word."""
        if self.faults:
            return "failed"
        if self.reviewed is not None:
            return str(self.reviewed.verdict).lower()
        return "planned" if self.plan is not None else "infeasible"

    def with_plan(self, plan: Manifest) -> "PlanOutcome":
        """The question answered by a plan."""
        return replace(self, plan=plan)

    def with_faults(self, faults: Sequence[str]) -> "PlanOutcome":
        """The question that cannot be answered."""
        return replace(self, faults=tuple(faults))

    def as_infeasible(self, reason: str) -> "PlanOutcome":
        """The question to which no plan is the answer."""
        return replace(self, infeasible=reason)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the planner, away from here; the answer brings the deployment back into the queue."""

    question: PlanOutcome


@dataclass(frozen=True, slots=True)
class Requeue:
    """Look again after a while, whatever happens."""

    after_s: float


Action = Apply | Create | Delete | Repurpose | PatchStatus | SetFinalizers | Emit | Ask | Requeue
