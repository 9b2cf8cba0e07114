"""What a pod gets from other objects, brought to this machine: volumes as folders, values for env.

Called by the pod's runner before the process starts, and then for what Secrets and ConfigMaps hold
since: a volume follows them, as a kubelet's does.
"""

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

from cleave.local.kubelet.pod_spec import PodError

from e2e.cluster.client import ApiError, Client, Manifest

_TOKEN_S = 3600
IMAGE_REGISTRY = "folders.test"
"""An image volume from here has the files of the folder of this machine that its name goes on with:
`folders.test/tmp/weights:1` those of `/tmp/weights:1`."""


class NotYetError(RuntimeError):
    """Something that the pod needs does not exist yet; it is tried again."""


async def folders(api: Client, pod: Manifest, at: Path) -> dict[str, str | None]:
    """Folder or file of each volume of `pod`, by name; None is memory.

    What has to be made is made below `at`. Raises NotYetError, and PodError for what a process
    cannot have.
    """
    volumes = pod["spec"].get("volumes") or []
    volumes_created = await asyncio.gather(*(_volume(api, pod, volume, at) for volume in volumes))
    return {volume["name"]: source for volume, source in zip(volumes, volumes_created, strict=True)}


async def refresh(api: Client, pod: Manifest, at: Path) -> None:
    """Bring the volumes that `folders` filled up to what their Secrets and ConfigMaps hold now.

    Raises NotYetError where one is gone; its files stay. Mounts with a subPath of a file do not
    follow, which is so with a kubelet, too.
    """
    for volume in pod["spec"].get("volumes") or []:
        for source in (volume.get("projected") or {}).get("sources") or [volume]:
            if "secret" in source or "configMap" in source:
                await _fill(api, pod, source, at / volume["name"])


def mounts(pod: Manifest, sources: dict[str, str | None]) -> list[Manifest]:
    """What `cluster.mounts` mounts for the only container."""
    found = []
    for mount in pod["spec"]["containers"][0].get("volumeMounts") or []:
        source = sources[mount["name"]]
        if source is not None and (inner := mount.get("subPath")):
            source = str(Path(source) / inner)
        found.append(
            {
                "source": source,
                "target": mount["mountPath"],
                "readOnly": bool(mount.get("readOnly", False)),
            }
        )
    return found


async def env(api: Client, pod: Manifest) -> list[Manifest]:
    """The only container's variables, those from Secrets and ConfigMaps with their values."""
    container, namespace = pod["spec"]["containers"][0], pod["metadata"]["namespace"]
    found: list[Manifest] = []
    for group in container.get("envFrom") or []:
        for kind, reference in _references(group):
            data = await _data(api, namespace, kind, reference)
            prefix = group.get("prefix", "")
            found += [{"name": prefix + key, "value": data[key].decode()} for key in sorted(data)]
    for variable in container.get("env") or []:
        source = variable.get("valueFrom") or {}
        for kind, reference in _references(source):
            data = await _data(api, namespace, kind, reference)
            value = data.get(reference["key"])
            if value is not None:
                found.append({"name": variable["name"], "value": value.decode()})
            elif not reference.get("optional"):
                raise NotYetError(f"{kind} {reference['name']} has no key {reference['key']}")
        if not list(_references(source)):
            found.append(variable)
    return found


def _references(source: Manifest) -> list[tuple[str, Manifest]]:
    known = {
        "secretKeyRef": "secrets",
        "secretRef": "secrets",
        "configMapKeyRef": "configmaps",
        "configMapRef": "configmaps",
    }
    return [(known[key], value) for key, value in source.items() if key in known]


async def _volume(api: Client, pod: Manifest, volume: Manifest, at: Path) -> str | None:
    folder = at / volume["name"]
    match volume:
        case {"emptyDir": {"medium": "Memory"}}:
            return None
        case {"hostPath": {"path": path}}:
            return _on_node(path)
        case {"persistentVolumeClaim": {"claimName": claim}}:
            return await _claimed(api, pod["metadata"]["namespace"], claim)
        case {"image": {"reference": reference}} if reference.startswith(IMAGE_REGISTRY):
            return _on_node(reference.removeprefix(IMAGE_REGISTRY))
    folder.mkdir(parents=True, exist_ok=True)
    match volume:
        case {"emptyDir": _}:
            pass
        case {"projected": {"sources": sources}}:
            for source in sources:
                await _fill(api, pod, source, folder)
        case {"secret": _} | {"configMap": _} | {"downwardAPI": _}:
            await _fill(api, pod, volume, folder)
        case _:
            kinds = ", ".join(key for key in volume if key != "name")
            raise PodError(f"volume {volume['name']}: a process cannot have {kinds}")
    return str(folder)


def _on_node(path: str) -> str:
    if not Path(path).exists():
        raise NotYetError(f"{path} does not exist on the node")
    return path


async def _fill(api: Client, pod: Manifest, source: Manifest, folder: Path) -> None:
    """Write the files of one source of a volume."""
    namespace = pod["metadata"]["namespace"]
    match source:
        case {"secret": reference}:
            _write(folder, reference, await _data(api, namespace, "secrets", reference))
        case {"configMap": reference}:
            _write(folder, reference, await _data(api, namespace, "configmaps", reference))
        case {"serviceAccountToken": projection}:
            (folder / projection["path"]).write_text(await _token(api, pod, projection))
        case {"downwardAPI": {"items": items}}:
            for item in items:
                (folder / item["path"]).write_text(_field(pod, item["fieldRef"]["fieldPath"]))


def _write(folder: Path, reference: Manifest, data: dict[str, bytes]) -> None:
    items = reference.get("items")
    paths = {key: key for key in data} if items is None else {i["key"]: i["path"] for i in items}
    for key, path in paths.items():
        if key not in data:
            if reference.get("optional"):
                continue
            raise NotYetError(f"{_name(reference)} has no key {key}")
        file = folder / path
        if file.exists() and file.read_bytes() == data[key]:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"..{file.name}")
        new.write_bytes(data[key])
        os.replace(new, file)


async def _data(api: Client, namespace: str, kind: str, reference: Manifest) -> dict[str, bytes]:
    """Content of a Secret or ConfigMap; nothing when it may be absent and is."""
    try:
        found = await api.get(f"/api/v1/namespaces/{namespace}/{kind}/{_name(reference)}")
    except ApiError as error:
        if error.status == 404 and reference.get("optional"):
            return {}
        raise NotYetError(f"{kind} {_name(reference)}: {error.status}") from error
    if kind == "secrets":
        return {k: base64.b64decode(v) for k, v in (found.get("data") or {}).items()}
    binary = {k: base64.b64decode(v) for k, v in (found.get("binaryData") or {}).items()}
    return {k: v.encode() for k, v in (found.get("data") or {}).items()} | binary


def _name(reference: Manifest) -> str:
    return str(reference.get("name") or reference.get("secretName"))


async def _token(api: Client, pod: Manifest, projection: Manifest) -> str:
    """A token of the pod's service account, as long as the pod lives."""
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName") or "default"
    spec: dict[str, Any] = {
        "expirationSeconds": projection.get("expirationSeconds", _TOKEN_S),
        "boundObjectRef": {
            "kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"],
        },
    }  # fmt: skip
    if audience := projection.get("audience"):
        spec["audiences"] = [audience]
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    try:
        response = await api.post(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
    except ApiError as error:
        raise NotYetError(f"token of service account {account}: {error}") from error
    return str(response["status"]["token"])


def _field(pod: Manifest, path: str) -> str:
    part, _, key = path.partition(".")
    if part != "metadata" or key not in ("name", "namespace", "uid"):
        raise PodError(f"downwardAPI: {path} cannot be had")
    return str(pod["metadata"][key])


async def _claimed(api: Client, namespace: str, claim: str) -> str:
    """The folder that a PersistentVolumeClaim is bound to."""
    try:
        bound = await api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
        volume = bound["spec"].get("volumeName")
        if volume is None:
            raise NotYetError(f"claim {claim} is not bound")
        found = await api.get(f"/api/v1/persistentvolumes/{volume}")
    except ApiError as error:
        raise NotYetError(f"claim {claim}: {error.status}") from error
    return str(found["spec"]["hostPath"]["path"])
