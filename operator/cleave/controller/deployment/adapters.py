"""Orders LoRA adapters from running instances, and reports what became of the orders. Pure.

Called by the deployment's reconcile. No pod and no engine restarts for an adapter: pods start with
the list of their time, and agents whose newest order differs from the present list get a new one.
Each agent then follows its order (`cleave.policy.adapters`); here only digests are compared.
"""

from collections.abc import Iterable, Iterator

from cleave.api.adapters import LoraAdapter
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import ObjectReference, OrderAdapters, Requeue
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.views import DeploymentView
from cleave.policy.adapters import AdapterSource, hash_adapters
from cleave.rpc.fleet_status import FleetInstance

ADAPTERS_LOADED = "AdaptersLoaded"
"""Condition type."""
_RETRY_S = 10.0
"""After an order; the next reports show whether agents have it."""


def list_orders(view: DeploymentView) -> Iterator[OrderAdapters | Requeue]:
    """Yield an order for each instance whose adapters differ from those of the spec."""
    deployment = view.deployment
    desired = tuple(to_sources(deployment.spec.adapters))
    digest = hash_adapters(desired)
    has_orders = False
    for pod in view.pods:
        reported = (view.instances or {}).get(pod.name)
        if reported is None or reported.adapters_digest == digest:
            continue
        if not (pod.is_alive and pod.ip):
            continue
        has_orders = True
        yield OrderAdapters(
            ObjectReference("Pod", pod.namespace, pod.name, pod.uid),
            agents=pod.agents,
            adapters=desired,
            generation=deployment.metadata.generation or 0,
            deployment=apply.build_reference(deployment),
        )
    if has_orders:
        yield Requeue(_RETRY_S)


def build_conditions(view: DeploymentView) -> Iterator[ConditionState]:
    """Yield whether every ready instance has loaded the adapters; nothing without adapters."""
    desired = list(to_sources(view.deployment.spec.adapters))
    if not desired:
        return
    ready = {pod.name for pod in view.pods if pod.ready and pod.is_alive}
    reported = [each for name, each in sorted((view.instances or {}).items()) if name in ready]
    if not reported:
        text = "no gateway has reported instances yet"
        yield ConditionState(ADAPTERS_LOADED, None, "NotReported", text)
        return
    digest = hash_adapters(desired)
    complete = [each for each in reported if _is_complete(each, digest)]
    text = f"{len(complete)} of {len(reported)} instances have loaded {len(desired)} adapters"
    if len(complete) == len(reported):
        yield ConditionState(ADAPTERS_LOADED, True, "Loaded", text)
        return
    failed = next((e for e in reported if e.adapter_fault and e.adapters_digest == digest), None)
    if failed is not None:
        text += f"; {failed.name}: {failed.adapter_fault}"
        yield ConditionState(ADAPTERS_LOADED, False, "LoadFailed", text)
        return
    waiting = next(each for each in reported if not _is_complete(each, digest))
    text += f"; {waiting.name} loads them"
    yield ConditionState(ADAPTERS_LOADED, False, "Loading", text)


def to_sources(adapters: Iterable[LoraAdapter]) -> Iterator[AdapterSource]:
    """Yield the adapters as agents are to have them."""
    for each in adapters:
        yield AdapterSource(each.name, each.source)


def _is_complete(instance: FleetInstance, digest: str) -> bool:
    return instance.adapters_digest == digest and not instance.adapters_pending
