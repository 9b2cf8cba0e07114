"""Pools from a placement: one InstancePool per role; the placement as status tells it.

Pure; called by `cleave.local` and the controller.
"""

import hashlib

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import Engine, EngineType
from cleave.api.planned import PlanGrowth, SelectedPlan
from cleave.api.pool import Colocation, InstancePool, InstancePoolSpec
from cleave.api.resource import Metadata
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.summary import instances, option, predicted
from cleave.pods.container import image
from cleave.pods.labels import DEPLOYMENT, ROLE, pool_name
from cleave.pods.spread import Machines, cells_per_node, num_nodes

_REVISION_DIGITS = 10


def pools(
    deployment: LLMDeployment,
    placement: Placement,
    machines: Machines = Machines(),  # noqa: B008 - a frozen value
) -> list[InstancePool]:
    """The pools that a placement asks for, in its order; `machines` are those of the cluster."""
    stamp = revision(deployment)
    return [_pool(deployment, planned, placement, machines, stamp) for planned in placement.pools]


def revision(deployment: LLMDeployment) -> str:
    """Identifies what prefill and decode instances must share: model and engine.

    Parallelism is left out: instances of unlike parallelism may hand KV to each other. So is where
    the model's files are kept. Cleave's version is in, by way of the default image: it decides the
    version of vLLM.
    """
    spec = deployment.spec
    # Defaults are left out, so that a field which a later version adds changes no revision.
    parts = (
        spec.model.model_dump_json(exclude_defaults=True, exclude={"cache"}),
        spec.engine.model_dump_json(exclude_defaults=True),
        spec.engine.image or image("worker"),
    )
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def selected_plan(
    deployment: LLMDeployment, placement: Placement, growth: PlanGrowth | None = None
) -> SelectedPlan:
    """The placement in force, for `status.plan`."""
    answer = placement.answer
    chosen = answer.selected if answer else None
    return SelectedPlan(
        revision=revision(deployment),
        reason=placement.reason,
        gpus=placement.gpus,
        pools=instances(placement.pools),
        algorithm=chosen.algorithm if chosen else "",
        verdict=str(answer.verdict) if answer else None,
        whole_below_tokens=(chosen.whole_below_tokens or None) if chosen else None,
        predicted=predicted(chosen) if chosen else None,
        growth=growth,
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


def _pool(
    deployment: LLMDeployment,
    planned: PlannedPool,
    placement: Placement,
    machines: Machines,
    stamp: str,
) -> InstancePool:
    spec = deployment.spec
    is_emulated = spec.engine.type is EngineType.EMULATED
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
            # Emulated engines need no GPU: none is too large for a node, no node is ever full.
            nodes=1 if is_emulated else num_nodes(planned, placement.pools, machines),
            colocation=_colocation(
                planned,
                None if is_emulated else cells_per_node(placement.pools, machines),
                machines.domain,
            ),
            gpu=None if is_emulated else planned.gpu,
            revision=stamp,
            model=spec.model,
            engine=_with_limits(spec.engine, planned),
            template=spec.template,
            pending_timeout_s=spec.rollout.pending_timeout_s,
            deletion_policy=spec.deletion_policy,
        ),
    )


def _colocation(planned: PlannedPool, cells: int | None, domain: str) -> Colocation | None:
    """Which instances share a domain; `cells` of the plan's cells fit one (None: not known)."""
    if planned.per_cell is None:
        return None
    return Colocation(
        per_cell=planned.per_cell * (cells or 1),
        topology_key=domain,
        exclusive=cells is not None,
    )
