"""The only part of the operator that writes: carries out what reconciles want done.

Used by the controller. What is hard: answers may be lost, objects may have changed, and another
operator may have taken over. Every write can be repeated, names the object it means, and is not
made once the lease has run out. Objects as the API server answers them go into the index at once,
so that the next decision knows what this one did.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import groupby

from cleave.api.role import Role
from cleave.controller import observed
from cleave.controller.actions import (
    Action,
    Apply,
    Ask,
    Create,
    Delete,
    Emit,
    PatchStatus,
    Reference,
    Repurpose,
    Requeue,
    SetFinalizers,
)
from cleave.controller.agents import AgentError, set_home
from cleave.controller.kube import (
    APPLY_PATCH,
    KINDS,
    MANAGER,
    MERGE_PATCH,
    ApiError,
    Kube,
    persistent,
)
from cleave.controller.metrics import Metrics
from cleave.controller.observed import timestamp
from cleave.pods.labels import DEPLOYMENT, Manifest

log = logging.getLogger(__name__)

Write = Apply | Create | Delete | Repurpose | PatchStatus | SetFinalizers | Emit

_LEASE_OVER = "the lease has run out"
_NOT_FOUND = 404
_CONFLICT = 409
_THEIRS = "is there already and belongs to something else; delete it, or choose another name"
_LIKELY_NAMES = ("Service",)
"""What has a name that somebody else may have chosen too, another deployment included."""
_SHARED = ("Service", "ServiceAccount", "RoleBinding")
"""What pools by hand have in common when they belong to one deployment by name."""
_AT_ONCE = 32
"""Requests under way at a time."""


class NotLeadingError(RuntimeError):
    """Another operator may be writing."""


class StaleError(RuntimeError):
    """The object has changed since it was seen; the decision has to be taken anew."""


class TakenError(RuntimeError):
    """Somebody else has an object of the name that this operator wants to make."""


class Executor:
    """Writes to one API server."""

    def __init__(
        self,
        kube: Kube,
        *,
        may_write: Callable[[], bool],
        seen: Callable[[Manifest], None],
        gone: Callable[[Reference], None],
        clock: Callable[[], float],
        metrics: Metrics,
        order: Callable[[str, Role], Awaitable[None]] = set_home,
    ) -> None:
        """`order` tells an agent its role; raises AgentError."""
        self._kube = kube
        self._order = order
        self._may_write = may_write
        self._seen, self._gone = seen, gone
        self._clock = clock
        self._metrics = metrics
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def carry_out(self, actions: Iterable[Action]) -> None:
        """Everything that writes, in order; what is alike side by side.

        Raises ApiError, StaleError, TakenError or NotLeadingError; what came before has been done.
        """
        writes = [each for each in actions if not isinstance(each, Ask | Requeue)]
        for kind, same in groupby(writes, key=type):
            batch = list(same)
            if kind in (Apply, Create, Delete, Repurpose, Emit):
                await self._side_by_side(batch)
            else:
                for each in batch:
                    await self._do(each)

    async def _side_by_side(self, batch: Sequence[Write]) -> None:
        ended = await asyncio.gather(*(self._do(each) for each in batch), return_exceptions=True)
        for error in ended:
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
                    case PatchStatus():
                        await self._patch_status(action)
                    case SetFinalizers():
                        await self._set_finalizers(action)
                    case Emit():
                        await self._emit(action)
        except ApiError as error:
            self._metrics.actions[name, "failed"] += 1
            if error.status == _CONFLICT:
                raise StaleError(str(error)) from error
            raise
        self._metrics.actions[name, "done"] += 1
        if not isinstance(action, PatchStatus | Emit):
            log.info("%s %s", name, _named(action))

    async def _apply(self, action: Apply) -> None:
        manifest = action.manifest
        meta = manifest["metadata"]
        kind, name = manifest["kind"], meta["name"]
        if action.is_new and kind in _LIKELY_NAMES and await self._is_there(manifest):
            return
        path = KINDS[kind].path(meta["namespace"], name)
        # Without force, whatever is there as another one wants it is a conflict.
        force = "false" if action.is_new else "true"
        query = {"fieldManager": MANAGER, "force": force}
        try:
            self._seen(await self._write("PATCH", path, manifest, APPLY_PATCH, query))
        except ApiError as error:
            if error.status == _CONFLICT and action.is_new:
                raise TakenError(f"{kind} {name} {_THEIRS} ({error.message})") from error
            raise

    async def _is_there(self, manifest: Manifest) -> bool:
        """Whether it is there as it should be.

        Raises TakenError when it is somebody else's, also where both want the same of it: what this
        operator owns goes with the deployment.
        """
        meta, kind = manifest["metadata"], manifest["kind"]
        try:
            there = await self._kube.get(kind, meta["namespace"], meta["name"])
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        ours = {owner["uid"] for owner in meta["ownerReferences"]}
        theirs = {owner["uid"] for owner in there["metadata"].get("ownerReferences", ())}
        if not (ours & theirs or (kind in _SHARED and _deployment(there) == _deployment(manifest))):
            raise TakenError(f"{kind} {meta['name']} {_THEIRS}")
        self._seen(there)
        return observed.child(there).applied == observed.child(manifest).applied != ""

    async def _create(self, action: Create) -> None:
        manifest = action.manifest
        path = KINDS[manifest["kind"]].path(manifest["metadata"]["namespace"])
        try:
            self._seen(await self._write("POST", path, manifest, query={"fieldManager": MANAGER}))
        except ApiError as error:
            # It was made before, by an answer that was lost or by the operator before this one.
            if error.status != _CONFLICT:
                raise
            target = manifest["metadata"]
            self._seen(await self._kube.get(manifest["kind"], target["namespace"], target["name"]))

    async def _delete(self, action: Delete) -> None:
        target = action.target
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        if target.uid:
            body["preconditions"] = {"uid": target.uid}
        if action.grace_s is not None:
            body["gracePeriodSeconds"] = action.grace_s
        path = KINDS[target.kind].path(target.namespace, target.name)
        try:
            answer = await self._write("DELETE", path, body)
        except ApiError as error:
            # Gone, or another one of its name is there.
            if error.status not in (_NOT_FOUND, _CONFLICT):
                raise
            self._gone(target)
            return
        if answer.get("kind") == target.kind and "deletionTimestamp" in answer["metadata"]:
            self._seen(answer)
        else:
            self._gone(target)

    async def _repurpose(self, action: Repurpose) -> bool:
        """First the agent, then the labels: a pod whose agent says no is replaced as ever.

        Whether it has the role.
        """
        target = action.target
        if not self._may_write():
            raise NotLeadingError(_LEASE_OVER)
        try:
            await self._order(action.agent, action.role)
        except AgentError as error:
            log.warning("Pod %s/%s keeps its role: %s", target.namespace, target.name, error)
            text = f"{target.name} does not become {action.role}: {error}"
            await self._emit(Emit(action.pool, "NotRepurposed", text, is_warning=True))
            return False
        if not action.metadata:
            return True
        body = {"metadata": {**action.metadata, "uid": target.uid}}
        path = KINDS["Pod"].path(target.namespace, target.name)
        try:
            query = {"fieldManager": MANAGER}
            self._seen(await self._write("PATCH", path, body, MERGE_PATCH, query))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            self._gone(target)
            return True
        text = f"{target.name} serves as {action.role} from now on, without a restart"
        await self._emit(Emit(action.pool, "Repurposed", text))
        return True

    async def _patch_status(self, action: PatchStatus) -> None:
        target = action.target
        api = KINDS[target.kind]
        body = {
            "apiVersion": api.version,
            "kind": target.kind,
            "metadata": {"name": target.name, "namespace": target.namespace, "uid": target.uid},
            "status": action.status,
        }
        path = api.path(target.namespace, target.name, "status")
        query = {"fieldManager": f"{MANAGER}-status", "force": "true"}
        try:
            self._seen(await self._write("PATCH", path, body, APPLY_PATCH, query))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            self._gone(target)

    async def _set_finalizers(self, action: SetFinalizers) -> None:
        target = action.target
        meta = {"finalizers": list(action.finalizers), "resourceVersion": action.version}
        path = KINDS[target.kind].path(target.namespace, target.name)
        query = {"fieldManager": MANAGER}
        try:
            answer = await self._write("PATCH", path, {"metadata": meta}, MERGE_PATCH, query)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            self._gone(target)
            return
        if answer["metadata"].get("finalizers") or "deletionTimestamp" not in answer["metadata"]:
            self._seen(answer)
        else:
            self._gone(target)

    async def _emit(self, action: Emit) -> None:
        """An Event that nobody can take is no reason to stop."""
        target = action.target
        now = timestamp(self._clock())
        text = f"{target.uid}/{action.reason}/{action.message}/{now}"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{target.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}",
                "namespace": target.namespace,
            },
            "involvedObject": {
                "apiVersion": KINDS[target.kind].version,
                "kind": target.kind,
                "namespace": target.namespace,
                "name": target.name,
                "uid": target.uid,
            },
            "reason": action.reason,
            "message": action.message,
            "type": "Warning" if action.is_warning else "Normal",
            "source": {"component": MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._write("POST", KINDS["Event"].path(target.namespace), event)
        except ApiError as error:
            if error.status != _CONFLICT:
                log.warning("Event of %s %s: %s", target.kind, target.name, error)

    async def _write(
        self,
        method: str,
        path: str,
        body: Manifest,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Manifest:
        """One write, repeated while its errors pass and the lease holds."""

        async def once() -> Manifest:
            if not self._may_write():
                raise NotLeadingError(_LEASE_OVER)
            return await self._kube.request(
                method, path, query=query, body=body, content_type=content_type
            )

        return await persistent(once)


def _deployment(manifest: Manifest) -> str | None:
    """Name of the deployment that it is labelled with."""
    name: str | None = manifest["metadata"].get("labels", {}).get(DEPLOYMENT)
    return name


def _named(action: Write) -> str:
    """What it was done to, for the log."""
    if isinstance(action, Apply | Create):
        meta = action.manifest["metadata"]
        return f"{action.manifest['kind']} {meta['namespace']}/{meta['name']}"
    return f"{action.target.kind} {action.target.namespace}/{action.target.name}"
