"""Executes the actions that reconciles return: the only part of the operator that writes.

Used by the controller. Responses may be lost, objects may have changed, and another operator may
have become the leader. So every write is idempotent, names its object by uid, and is not sent once
the lease has expired. Objects in responses are put into the cache at once, so that the next
decision includes this write.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from cleave.api.role import Role
from cleave.controller.cluster import client, objects
from cleave.controller.cluster.actions import (
    Action,
    Apply,
    Create,
    Delete,
    Emit,
    ObjectReference,
    OrderAdapters,
    PatchStatus,
    Repurpose,
    RequestPlan,
    Requeue,
    SetFinalizers,
    SetLabels,
    Write,
)
from cleave.controller.cluster.agent_client import AgentError
from cleave.controller.cluster.objects import format_timestamp
from cleave.controller.metrics import OperatorMetrics
from cleave.manifests.labels import DEPLOYMENT, Manifest
from cleave.policy.adapters import AdapterSource
from cleave.rpc.credentials import AgentEndpoint

log = logging.getLogger(__name__)

_QUERY = {"fieldManager": client.FIELD_MANAGER}
_LEASE_EXPIRED = "the lease has expired"
_NOT_FOUND = 404
_CONFLICT = 409
_TAKEN_MESSAGE = "exists already and belongs to something else; delete it, or choose another name"
_SHAREABLE_KINDS = ("Service", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy")
"""Kinds that manually created pools share when they name the same deployment."""
_MIN_WRITE_S = 0.05
"""A write is not sent when less time is left of the lease."""
_MAX_COUNTED_EVENTS = 4_096
_MAX_CONCURRENT = 32
"""Most concurrent requests."""


SetRole = Callable[[AgentEndpoint, Role], Awaitable[None]]
"""Sets the role of an agent's instance. Raises AgentError."""
SendAdapters = Callable[[AgentEndpoint, Iterable[AdapterSource], int], Awaitable[None]]
"""Orders adapters from an agent, for a generation of the deployment. Raises AgentError."""


class NotLeadingError(RuntimeError):
    """This operator does not hold the lease, so another one may be writing."""


class StaleError(RuntimeError):
    """The object has changed since it was cached; the decision has to be made again."""


class NameTakenError(RuntimeError):
    """An object of this name exists and belongs to something else."""


class Executor:
    """Executes actions against one API server."""

    def __init__(
        self,
        kube: client.KubeClient,
        *,
        get_lease_s: Callable[[], float],
        on_change: Callable[[Manifest], None],
        on_delete: Callable[[ObjectReference], None],
        clock: Callable[[], float],
        metrics: OperatorMetrics,
        set_role: SetRole,
        send_adapters: SendAdapters,
        list_owners: Callable[[str, str], set[str]],
    ) -> None:
        """`get_lease_s`: seconds for which this operator may still write. `list_owners`: uids of
        the deployment of a namespace and name, and of all pools that name it."""
        self._kube = kube
        self._set_role = set_role
        self._send_adapters = send_adapters
        self._list_owners = list_owners
        self._get_lease_s = get_lease_s
        self._on_change, self._on_delete = on_change, on_delete
        self._clock = clock
        self._metrics = metrics
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._event_counts: dict[str, int] = {}
        """How often each Event was recorded, by name, latest last."""

    async def carry_out(self, actions: Iterable[Action]) -> None:
        """Execute all writes in order, those of the same type concurrently. Raises KubeApiError,
        StaleError, NameTakenError or NotLeadingError; earlier writes persist."""
        writes = [each for each in actions if not isinstance(each, RequestPlan | Requeue)]
        for kind, same in groupby(writes, key=type):
            if kind in (PatchStatus, SetFinalizers):
                for each in same:
                    await self._do(each)
                continue
            batch = (self._do(each) for each in same)
            for error in await asyncio.gather(*batch, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

    async def _do(self, action: Write) -> None:
        name = type(action).__name__
        try:
            async with self._slots:
                match action:
                    case Apply():
                        await self._apply(action)
                    case Create():
                        await self._create(action)
                    case Delete():
                        await self._delete(action)
                    case Repurpose():
                        if not await self._repurpose(action):
                            self._metrics.actions[name, "failed"] += 1
                            return
                    case OrderAdapters():
                        if not await self._order_adapters(action):
                            self._metrics.actions[name, "failed"] += 1
                            return
                    case SetLabels():
                        await self._set_labels(action)
                    case PatchStatus():
                        await self._patch_status(action)
                    case SetFinalizers():
                        await self._set_finalizers(action)
                    case Emit():
                        await self._emit(action)
        except client.KubeApiError as error:
            self._metrics.actions[name, "failed"] += 1
            if error.status == _CONFLICT:
                raise StaleError(str(error)) from error
            raise
        self._metrics.actions[name, "done"] += 1
        if not isinstance(action, PatchStatus | Emit):
            target = _get_target(action)
            log.info("%s %s %s/%s", name, target.kind, target.namespace, target.name)

    async def _apply(self, action: Apply) -> None:
        manifest, is_forced = action.manifest, True
        if action.is_new:
            existing = await self._find_own(manifest)
            if existing is not None and _is_applied(manifest, existing):
                self._on_change(existing)
                return
            # Otherwise somebody may create it in this moment.
            is_forced = existing is not None
        query = {**_QUERY, "force": "true" if is_forced else "false"}
        self._on_change(await self._patch_whole(_get_target(action), manifest, query))

    async def _patch_whole(
        self, target: ObjectReference, manifest: Manifest, query: Mapping[str, str]
    ) -> Manifest:
        # Volcano's PodGroups have the name of Kubernetes' own.
        kind = replace(client.KINDS[target.kind], version=manifest["apiVersion"])
        path = kind.build_path(target.namespace, target.name)
        return await self._write("PATCH", path, manifest, client.APPLY_PATCH, query)

    async def _find_own(self, manifest: Manifest) -> Manifest | None:
        """The object that a manifest of which the cache has none is to be applied to; None: there
        is none.

        Raises NameTakenError when it belongs to something else: it would be deleted with the
        deployment, and pods would get the rights that an account or role of it has.
        """
        meta, kind = manifest["metadata"], manifest["kind"]
        try:
            existing = await self._kube.get(kind, meta["namespace"], meta["name"])
        except client.KubeApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        if not self._is_own(manifest, existing):
            raise NameTakenError(f"{kind} {meta['name']} {_TAKEN_MESSAGE}")
        return existing

    def _is_own(self, manifest: Manifest, existing: Manifest) -> bool:
        """Whether an object that exists has the same owner as a manifest, or one that may share it:
        labels alone prove nothing."""
        meta = manifest["metadata"]
        owners = {owner["uid"] for owner in meta["ownerReferences"]}
        if manifest["kind"] in _SHAREABLE_KINDS:
            owners |= self._list_owners(meta["namespace"], meta["labels"][DEPLOYMENT])
        existing_owners = existing["metadata"].get("ownerReferences", ())
        return any(owner["uid"] in owners for owner in existing_owners)

    async def _create(self, action: Create) -> None:
        target = _get_target(action)
        path = client.KINDS[target.kind].build_path(target.namespace)
        try:
            response = await self._write("POST", path, action.manifest)
        except client.KubeApiError as error:
            # It exists: the response was lost, or the previous leader created it.
            if error.status != _CONFLICT:
                raise
            response = await self._kube.get(target.kind, target.namespace, target.name)
        self._on_change(response)

    async def _delete(self, action: Delete) -> None:
        target = action.target
        body: Manifest = {"preconditions": {"uid": target.uid}} if target.uid else {}
        body |= {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if action.grace_s is not None:
            body["gracePeriodSeconds"] = action.grace_s
        try:
            response = await self._write("DELETE", _build_path(target), body, query=None)
        except client.KubeApiError as error:
            # It was deleted, or another object has its name.
            if error.status not in (_NOT_FOUND, _CONFLICT):
                raise
            self._on_delete(target)
            return
        if response.get("kind") == target.kind and "deletionTimestamp" in response["metadata"]:
            self._on_change(response)
        else:
            self._on_delete(target)

    async def _repurpose(self, action: Repurpose) -> bool:
        """Set the agent's role, then the pod's labels; returns whether the instance has the role. A
        pod whose agent refuses keeps its labels and is replaced like any other."""
        target = action.target
        try:
            # The agent refuses an order that is older than another one.
            self._get_write_timeout_s()
            await self._set_role(action.agent, action.role)
        except AgentError as error:
            log.warning("Pod %s/%s keeps its role: %s", target.namespace, target.name, error)
            text = f"{target.name} does not become {action.role}: {error}"
            await self._emit(Emit(action.pool, "NotRepurposed", text, is_warning=True))
            return False
        body = {"metadata": {**action.metadata, "uid": target.uid}}
        if action.metadata and (response := await self._patch(target, body)):
            self._on_change(response)
            text = f"{target.name} serves as {action.role} from now on, without a restart"
            await self._emit(Emit(action.pool, "Repurposed", text))
        return True

    async def _order_adapters(self, action: OrderAdapters) -> bool:
        """Order adapters from all agents of a pod; returns whether they have accepted."""
        target = action.target
        try:
            self._get_write_timeout_s()
            for agent in action.agents:
                await self._send_adapters(agent, action.adapters, action.generation)
        except AgentError as error:
            log.warning("Pod %s/%s gets no adapters: %s", target.namespace, target.name, error)
            text = f"{target.name} does not load spec.adapters: {error}"
            await self._emit(Emit(action.deployment, "AdaptersNotOrdered", text, is_warning=True))
            return False
        return True

    async def _set_labels(self, action: SetLabels) -> None:
        target = action.target
        labels, annotations = action.labels, action.annotations
        body = {"metadata": {"labels": labels, "annotations": annotations, "uid": target.uid}}
        if response := await self._patch(target, body):
            self._on_change(response)

    async def _patch_status(self, action: PatchStatus) -> None:
        target = action.target
        body = {
            "apiVersion": client.KINDS[target.kind].version,
            "kind": target.kind,
            "metadata": {"name": target.name, "namespace": target.namespace, "uid": target.uid},
            "status": action.status,
        }
        query = {"fieldManager": f"{client.FIELD_MANAGER}-status", "force": "true"}
        if response := await self._patch(target, body, "status", client.APPLY_PATCH, query):
            self._on_change(response)

    async def _set_finalizers(self, action: SetFinalizers) -> None:
        target = action.target
        meta = {"finalizers": list(action.finalizers), "resourceVersion": action.version}
        if not (response := await self._patch(target, {"metadata": meta})):
            return
        after = response["metadata"]
        if after.get("finalizers") or "deletionTimestamp" not in after:
            self._on_change(response)
        else:
            self._on_delete(target)

    async def _patch(
        self,
        target: ObjectReference,
        body: Manifest,
        subresource: str = "",
        content_type: str = client.MERGE_PATCH,
        query: Mapping[str, str] = _QUERY,
    ) -> Manifest | None:
        """Patch an existing object; None: it was deleted."""
        path = _build_path(target, subresource)
        try:
            return await self._write("PATCH", path, body, content_type, query)
        except client.KubeApiError as error:
            if error.status != _NOT_FOUND:
                raise
            self._on_delete(target)
            return None

    async def _emit(self, action: Emit) -> None:
        """Create an Event, or count it again if it exists; errors are logged only."""
        target = action.target
        version, now = client.KINDS[target.kind].version, format_timestamp(self._clock())
        involved = {"namespace": target.namespace, "name": target.name, "uid": target.uid}
        text = f"{target.uid}/{action.reason}/{action.message}"
        name = f"{target.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": target.namespace},
            "involvedObject": {"apiVersion": version, "kind": target.kind, **involved},
            "reason": action.reason,
            "message": action.message,
            "type": "Warning" if action.is_warning else "Normal",
            "source": {"component": client.FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        count = self._event_counts.pop(name, 0) + 1
        self._event_counts[name] = count
        if len(self._event_counts) > _MAX_COUNTED_EVENTS:
            del self._event_counts[next(iter(self._event_counts))]
        again = {"count": max(count, 2), "lastTimestamp": now}
        try:
            await self._create_or_patch_event(target.namespace, name, event, again)
        except client.KubeApiError as error:
            log.warning("Event of %s %s: %s", target.kind, target.name, error)

    async def _create_or_patch_event(
        self, namespace: str, name: str, event: Manifest, again: Manifest
    ) -> None:
        """Raises KubeApiError."""
        kind = client.KINDS["Event"]
        try:
            await self._write("POST", kind.build_path(namespace), event, query=None)
        except client.KubeApiError as error:
            if error.status != _CONFLICT:
                raise
            path = kind.build_path(namespace, name)
            await self._write("PATCH", path, again, client.MERGE_PATCH)

    async def _write(
        self,
        method: str,
        path: str,
        body: Manifest,
        content_type: str = client.JSON,
        query: Mapping[str, str] | None = _QUERY,
    ) -> Manifest:
        """Send one write, with retries while errors are transient and the lease is held."""

        async def once() -> Manifest:
            timeout_s = self._get_write_timeout_s()
            # The API server drops the request then as well.
            parameters = {**(query or {}), "timeout": f"{timeout_s:.3f}s"}
            return await self._kube.request(
                method,
                path,
                query=parameters,
                body=body,
                content_type=content_type,
                timeout_s=timeout_s,
            )

        return await client.retry_transient(once)

    def _get_write_timeout_s(self) -> float:
        """The time-out of a write: none may land after the lease. Raises NotLeadingError."""
        lease_s = self._get_lease_s()
        if lease_s < _MIN_WRITE_S:
            raise NotLeadingError(_LEASE_EXPIRED)
        return min(lease_s, client.TIMEOUT_S)


def _is_applied(manifest: Manifest, existing: Manifest) -> bool:
    """Whether an object is as a manifest was applied before."""
    return objects.parse_child(existing).applied == objects.parse_child(manifest).applied != ""


def _get_target(action: Write) -> ObjectReference:
    """The object that an action writes."""
    if isinstance(action, Apply | Create):
        meta = action.manifest["metadata"]
        return ObjectReference(action.manifest["kind"], meta["namespace"], meta["name"])
    return action.target


def _build_path(target: ObjectReference, subresource: str = "") -> str:
    return client.KINDS[target.kind].build_path(target.namespace, target.name, subresource)
