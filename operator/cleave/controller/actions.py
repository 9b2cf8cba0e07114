"""What a reconcile wants done: values, made by pure decisions and carried out by the executor."""

from dataclasses import dataclass

from cleave.planner.plan import PlannedPool
from cleave.pods.labels import Manifest


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
class Plan:
    """Ask the planner, away from here; the answer brings the deployment back into the queue."""

    inputs: str
    """Digest of the question; the answer carries it."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Look again after a while, whatever happens."""

    after_s: float


Action = Apply | Create | Delete | PatchStatus | SetFinalizers | Emit | Plan | Requeue


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What came of one question to the planner."""

    inputs: str
    pools: tuple[PlannedPool, ...] = ()
    """Empty: no plan."""
    status: Manifest | None = None
    """The plan as `status.plan` tells it."""
    faults: tuple[str, ...] = ()
    """What is wrong with the question, one line each."""
    infeasible: str = ""
    """Why no plan holds the targets."""
