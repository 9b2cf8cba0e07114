"""Pools from a placement: one InstancePool per role; the placement as status tells it.

Pure; called by `cleave.local`.
"""

import hashlib

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import Engine, EngineType
from cleave.api.planned import SelectedPlan
from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.api.resource import Metadata
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.summary import option, predicted
from cleave.pods.container import image
from cleave.pods.labels import DEPLOYMENT, ROLE, pool_name

_REVISION_DIGITS = 10


def pools(deployment: LLMDeployment, placement: Placement) -> list[InstancePool]:
    """The pools that a placement asks for, in its order."""
    stamp = revision(deployment)
    return [_pool(deployment, planned, stamp) for planned in placement.pools]


def revision(deployment: LLMDeployment) -> str:
    """Identifies what prefill and decode instances must share: model and engine.

    Parallelism is left out: instances of unlike parallelism may hand KV to each other. Cleave's
    version is in, by way of the default image: it decides the version of vLLM.
    """
    spec = deployment.spec
    # Defaults are left out, so that a field which a later version adds changes no revision.
    parts = (
        spec.model.model_dump_json(exclude_defaults=True),
        spec.engine.model_dump_json(exclude_defaults=True),
        spec.engine.image or image("worker"),
    )
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def selected_plan(deployment: LLMDeployment, placement: Placement) -> SelectedPlan:
    """The placement in force, for `status.plan`."""
    answer = placement.answer
    chosen = answer.selected if answer else None
    return SelectedPlan(
        revision=revision(deployment),
        reason=placement.reason,
        gpus=placement.gpus,
        verdict=str(answer.verdict) if answer else None,
        predicted=predicted(chosen) if chosen else None,
        alternatives=[option(plan) for plan in answer.alternatives[:3]] if answer else [],
    )


def _with_limits(engine: Engine, planned: PlannedPool) -> Engine:
    """The engine with the limits of a pass that the plan assumes; stated arguments come first."""
    limits = (
        ("--max-num-seqs", planned.max_num_seqs),
        ("--max-num-batched-tokens", planned.max_num_batched_tokens),
    )
    added = [
        part
        for flag, value in limits
        if value is not None and not engine.states(flag)
        for part in (flag, str(value))
    ]
    return engine.model_copy(update={"args": [*added, *engine.args]}) if added else engine


def _pool(deployment: LLMDeployment, planned: PlannedPool, stamp: str) -> InstancePool:
    spec = deployment.spec
    return InstancePool(
        metadata=Metadata(
            name=pool_name(deployment.name, planned.role),
            namespace=deployment.namespace,
            labels={DEPLOYMENT: deployment.name, ROLE: str(planned.role)},
        ),
        spec=InstancePoolSpec(
            deployment=deployment.name,
            role=planned.role,
            replicas=planned.replicas,
            parallelism=planned.parallelism,
            gpu=None if spec.engine.type is EngineType.EMULATED else planned.gpu,
            revision=stamp,
            model=spec.model,
            engine=_with_limits(spec.engine, planned),
            template=spec.template,
        ),
    )
