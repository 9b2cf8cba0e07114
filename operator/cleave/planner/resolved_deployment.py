"""A deployment with what follows from its spec: its model's dimensions and its KV connector. Pure
but for a model's folder, which is read where the deployment starts on this machine.

Made once where a manifest is read (by a reconcile, the webhook or the command line). Checks, plans
and builders of manifests take it, so that all of them see one model and one connector.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.api.engine import EngineType
from cleave.perf.model import model_source
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.planner import connector_choice, deployment_checks
from cleave.planner.connector_choice import ConnectorChoice


@dataclass(frozen=True)
class ResolvedDeployment:
    """A deployment and what follows from its spec."""

    written: LLMDeployment
    """As its author wrote it, with its model's config once that was read or reported."""
    shape: ModelShape | None
    """The model's dimensions; None: not known, or the engines are emulated: they have no weights to
    shard and stand in for any model."""
    unknown_model: str | None
    """Why the planner does not know the model's dimensions; None: it does."""
    choice: ConnectorChoice
    """The KV connector that the engines use, and why."""
    is_in_cluster: bool
    """Whether it starts in a cluster: no files of its author are read, and the first engine reports
    a model that is not known."""

    @property
    def spec(self) -> LLMDeploymentSpec:
        """Of `written`."""
        return self.written.spec

    @cached_property
    def deployment(self) -> LLMDeployment:
        """With the connector in use as `engine.connector`, where that is not the default."""
        if self.choice.reason is None:
            return self.written
        engine = self.spec.engine.model_copy(update={"connector": self.choice.connector})
        spec = self.spec.model_copy(update={"engine": engine})
        return self.written.model_copy(update={"spec": spec})

    @cached_property
    def start_faults(self) -> tuple[str, ...]:
        """Settings with which no pod is created, no engine starts, or nothing could be
        requested."""
        return tuple(deployment_checks.list_start_faults(self.spec, self.shape))

    @cached_property
    def parallelism_faults(self) -> tuple[str, ...]:
        """Manual parallel sizes that the model, or the connector between roles, does not allow."""
        connector = self.choice.connector
        return tuple(deployment_checks.list_parallelism_faults(self.spec, self.shape, connector))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Legal settings that are probably mistakes or limit the planner."""
        return tuple(
            deployment_checks.list_warnings(
                self.spec, self.choice, self.unknown_model, in_cluster=self.is_in_cluster
            )
        )

    def with_max_model_len(self, tokens: int | None) -> "ResolvedDeployment":
        """With `model.maxModelLen`, which changes nothing of the rest; None: its own."""
        if tokens is None:
            return self
        model = self.spec.model.model_copy(update={"max_model_len": tokens})
        spec = self.spec.model_copy(update={"model": model})
        return replace(self, written=self.written.model_copy(update={"spec": spec}))


def resolve(deployment: LLMDeployment) -> ResolvedDeployment:
    """Resolve a deployment that starts on this machine, or is planned here: its model may be in a
    folder."""
    return _resolve(deployment, is_in_cluster=False)


def resolve_in_cluster(deployment: LLMDeployment) -> ResolvedDeployment:
    """Resolve a deployment of a cluster. Pure."""
    return _resolve(deployment, is_in_cluster=True)


def _resolve(deployment: LLMDeployment, *, is_in_cluster: bool) -> ResolvedDeployment:
    spec = deployment.spec
    shape, unknown_model = None, None
    if spec.engine.type is not EngineType.EMULATED:
        load = model_source.load_known_shape if is_in_cluster else model_source.load_shape
        try:
            shape = load(spec.model)
        except UnknownModelError as error:
            unknown_model = str(error)
    choice = connector_choice.choose_connector(spec, shape)
    return ResolvedDeployment(deployment, shape, unknown_model, choice, is_in_cluster)
