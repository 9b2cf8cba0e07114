"""Builds InstancePools from a placement: one per role; and the placement for the status.

Pure; called by `cleave.local` and the controller.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineSpec, EngineType
from cleave.api.model import ModelSpec
from cleave.api.plan import PlanGrowth, SelectedPlan
from cleave.api.pool import CellMember, Colocation, InstancePool, InstancePoolSpec
from cleave.api.resource import Metadata
from cleave.api.role import Parallelism, Role
from cleave.api.scheduling import RoleLimits, Scheduling
from cleave.manifests.container import get_image
from cleave.manifests.labels import DEPLOYMENT, ROLE, get_pool_name
from cleave.manifests.topology import (
    NodeTopology,
    count_cells_per_node,
    count_nodes,
    fits_one_pod,
)
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.resolved_deployment import ResolvedDeployment
from cleave.planner.result.status import (
    build_kv_link,
    build_plan_option,
    build_predicted,
    build_reuse,
    to_role_pools,
)

_REVISION_DIGITS = 10


def build_pools(
    resolved: ResolvedDeployment,
    placement: Placement,
    machines: NodeTopology = NodeTopology(),  # noqa: B008 - a frozen value
) -> list[InstancePool]:
    """Return the pools of a placement, in its order; `machines`: GPUs of the nodes."""
    resolved = resolved.with_max_model_len(placement.max_model_len)
    deployment, revision_hash = resolved.deployment, hash_revision(resolved)
    kinds = _list_kinds(deployment, placement)
    if deployment.spec.can_share_gpu_memory and fits_one_pod(kinds, machines):
        return [_build_cell_pool(deployment, placement, revision_hash)]
    return [
        _build_pool(deployment, planned, placement, machines, revision_hash)
        for planned in placement.pools
    ]


def hash_revision(resolved: ResolvedDeployment) -> str:
    """Hash the fields that prefill and decode instances must share: model and engine.

    The volume or image with the model's files belongs to the model; what they contain, engines find
    out. Parallelism is left out, as instances of different parallelism can exchange KV, and so are
    where downloads are kept, spec.model.config, which engines do not read, and what the engines of
    one role have in addition: it is part of their pool. Cleave's version is
    included through the default image, as it decides the version of vLLM.
    """
    spec = resolved.deployment.spec
    # Without defaults, so that a field which a later version adds changes no revision.
    parts = (
        spec.model.model_dump_json(
            exclude_defaults=True, exclude={"config": True, "cache": _exclude_cache(spec.model)}
        ),
        spec.engine.model_dump_json(exclude_defaults=True, exclude={"connector", "roles"}),
        # The one in use, so that pairs have the same after a later version changes the default.
        str(spec.engine.kv_connector),
        spec.engine.image or get_image("worker"),
    )
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def _exclude_cache(model: ModelSpec) -> Literal[True] | dict[str, Any]:
    """What of spec.model.cache does not decide what engines load: how a volume is mounted, and all
    of it where it keeps downloads."""
    cache = model.cache
    if cache is None or not (model.folder or cache.image):
        return True
    return {"persistent_volume_claim": {"read_only"}}


def build_selected_plan(
    resolved: ResolvedDeployment, placement: Placement, growth: PlanGrowth | None = None
) -> SelectedPlan:
    """Return the current placement, for `status.plan`."""
    result = placement.result
    selected = result.selected if result else None
    resolved = resolved.with_max_model_len(placement.max_model_len)
    return SelectedPlan(
        revision=hash_revision(resolved),
        reason="; ".join(filter(None, (placement.reason, resolved.choice.describe()))),
        gpus=placement.gpus,
        pools=to_role_pools(placement.pools),
        algorithm=selected.algorithm if selected else "",
        max_model_len=placement.max_model_len,
        verdict=str(result.verdict) if result else None,
        whole_below_tokens=(selected.whole_below_tokens or None) if selected else None,
        ahead_from_tokens=(selected.ahead_from_tokens or None) if selected else None,
        predicted=build_predicted(selected) if selected else None,
        kv_link=build_kv_link(placement.kv_link),
        reuse=build_reuse(result.reuse) if result else None,
        growth=growth,
        alternatives=[*map(build_plan_option, result.alternatives[:3])] if result else [],
    )


def _with_limits(
    engine: EngineSpec, planned: PlannedPool, all_pools: Iterable[PlannedPool]
) -> EngineSpec:
    """Add the batch limits that the plan assumes, unless the user's arguments set them."""
    if engine.scheduling:
        engine, planned = _with_role_limits(engine, engine.scheduling, planned, all_pools)
    limits = (
        ("--max-num-seqs", planned.max_num_seqs),
        ("--max-num-batched-tokens", planned.max_num_batched_tokens),
    )
    added = [
        part
        for flag, value in limits
        if value is not None and not engine.has_flag(flag)
        for part in (flag, str(value))
    ]
    return engine.model_copy(update={"args": [*added, *engine.args]}) if added else engine


def _with_role_limits(
    engine: EngineSpec, scheduling: Scheduling, planned: PlannedPool, pools: Iterable[PlannedPool]
) -> tuple[EngineSpec, PlannedPool]:
    """Give the engine the limits of each role, and start it with the largest ones."""
    by_role = {pool.role: pool for pool in pools}
    limits = [_merge_limits(scheduling.get_limits(role), by_role.get(role)) for role in Role]
    own = next(each for each in limits if each.role == planned.role)
    seqs = max((each.max_num_seqs or 0 for each in limits), default=0)
    tokens = max((each.max_num_batched_tokens or 0 for each in limits), default=0)
    limits = [each for each in limits if each.max_num_seqs or each.max_num_batched_tokens]
    return (
        engine.model_copy(update={"scheduling": scheduling.model_copy(update={"limits": limits})}),
        replace(
            planned,
            # A role without its own limit uses the engine's default.
            max_num_seqs=own.max_num_seqs and seqs,
            max_num_batched_tokens=own.max_num_batched_tokens and tokens,
        ),
    )


def _merge_limits(limits: RoleLimits, planned: PlannedPool | None) -> RoleLimits:
    if planned is None:
        return limits
    return RoleLimits(
        role=limits.role,
        max_num_seqs=limits.max_num_seqs or planned.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens or planned.max_num_batched_tokens,
    )


def _build_pool(
    deployment: LLMDeployment,
    planned: PlannedPool,
    placement: Placement,
    machines: NodeTopology,
    revision_hash: str,
) -> InstancePool:
    spec = deployment.spec
    is_emulated = spec.engine.type is EngineType.EMULATED
    cells = None if is_emulated else count_cells_per_node(placement.pools, machines)
    return InstancePool(
        metadata=Metadata(
            name=get_pool_name(deployment.name, planned.role),
            namespace=deployment.namespace,
            labels={DEPLOYMENT: deployment.name, ROLE: str(planned.role)},
        ),
        spec=InstancePoolSpec(
            deployment=deployment.name,
            role=planned.role,
            replicas=planned.replicas,
            parallelism=planned.parallelism,
            # Emulated engines need no GPU, so each fits on any node.
            nodes=count_nodes(
                planned, placement.pools, NodeTopology() if is_emulated else machines
            ),
            colocation=_build_colocation(planned, cells, machines.domain),
            gpu=None if is_emulated else planned.gpu,
            revision=revision_hash,
            model=spec.model,
            engine=_with_limits(spec.engine.for_role(planned.role), planned, placement.pools),
            adapters=spec.adapters,
            template=spec.template,
            pending_timeout_s=spec.rollout.pending_timeout_s,
            deletion_policy=spec.deletion_policy,
        ),
    )


def _list_kinds(deployment: LLMDeployment, placement: Placement) -> list[PlannedPool]:
    """The planned pools; those of emulated engines fit on nodes of any kind."""
    if deployment.spec.engine.type is EngineType.EMULATED:
        return [replace(planned, gpu=None) for planned in placement.pools]
    return list(placement.pools)


def _build_cell_pool(
    deployment: LLMDeployment, placement: Placement, revision_hash: str
) -> InstancePool:
    """The pool whose instances are the cells of a placement, each in one pod."""
    first, spec = placement.pools[0], deployment.spec
    engines = [
        _with_limits(spec.engine.for_role(each.role), each, placement.pools)
        for each in placement.pools
    ]
    shared = engines[0].model_copy(update={"args": spec.engine.args})
    members = [
        CellMember(
            role=planned.role,
            replicas=planned.per_cell or 1,
            parallelism=planned.parallelism,
            args=_remove_shared(engine, spec.engine.args, spec.engine.get_role(planned.role).args),
        )
        for planned, engine in zip(placement.pools, engines, strict=True)
    ]
    pool = _build_pool(deployment, first, placement, NodeTopology(), revision_hash)
    cells = {"replicas": first.replicas // (first.per_cell or 1), "members": members}
    own = {"role": Role.MIXED, "parallelism": Parallelism(), "colocation": None, "engine": shared}
    labels = {**pool.metadata.labels, ROLE: str(Role.MIXED)}
    named = {"name": get_pool_name(deployment.name, Role.MIXED), "labels": labels}
    return pool.model_copy(
        update={
            "metadata": pool.metadata.model_copy(update=named),
            "spec": pool.spec.model_copy(update={**cells, **own}),
        }
    )


def _remove_shared(engine: EngineSpec, shared: list[str], own: list[str]) -> list[str]:
    """What an engine has beside the arguments that all members share: limits, and its role's."""
    return [*engine.args[: len(engine.args) - len(shared) - len(own)], *own]


def _build_colocation(planned: PlannedPool, cells: int | None, domain: str) -> Colocation | None:
    """Which instances share a domain; `cells`: cells that fit one (None: not known)."""
    if planned.per_cell is None:
        return None
    per_cell = planned.per_cell * (cells or 1)
    return Colocation(per_cell=per_cell, topology_key=domain, exclusive=cells is not None)
