"""Volumes of a worker: scratch space, and the model's files. Pure.

What is hard: a model is given as a repository or as a folder, and kept on the node, in a volume or
in an image; each combination determines the path that the engine loads.
"""

from cleave.api.model import Model
from cleave.manifests.container import HOME, scratch
from cleave.manifests.labels import Manifest

HUB = "/var/cache/cleave"
"""Mount path of a volume with a Hugging Face cache."""
IMAGE = "/model"
"""Mount path of an image with a model's files, unless the source names a folder."""

Mounted = tuple[Manifest, Manifest]
"""A volume and its mount."""


def storage(model: Model) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of a worker."""
    pairs = [
        scratch("tmp", "/tmp"),  # noqa: S108 - a mount inside the container
        scratch("home", HOME),
        # An engine's processes share memory; the default of 64 MiB is too small.
        scratch("shm", "/dev/shm", medium="Memory"),  # noqa: S108
        *_files(model),
    ]
    volumes, mounts = zip(*pairs, strict=True)
    return list(volumes), list(mounts)


def loaded_path(model: Model) -> str:
    """What the engine loads: a repository id, or a folder inside the container."""
    if model.cache and model.cache.image:
        return model.folder or IMAGE
    return model.locator


def hub_cache(model: Model) -> str | None:
    """Folder for downloads (HF_HOME); None: the container's own, lost when it ends."""
    cache = model.cache
    if cache is None or model.folder or cache.image:
        return None
    return cache.host_path.path if cache.host_path else HUB


def _files(model: Model) -> list[Mounted]:
    cache, folder = model.cache, model.folder
    if cache and cache.image:
        return [_image(cache.image.reference, folder or IMAGE)]
    if cache and (claim := cache.persistent_volume_claim):
        read_only = claim.read_only or folder is not None
        return [_claim(claim.claim_name, folder or HUB, read_only=read_only)]
    outside = cache.host_path.path if cache and cache.host_path else None
    if folder:
        volume = {"path": outside or folder, "type": "Directory"}
        return [({"name": "model", "hostPath": volume}, _mount(folder, read_only=True))]
    if outside:
        # The same path inside as outside, as it is without containers.
        volume = {"path": outside, "type": "DirectoryOrCreate"}
        return [({"name": "model", "hostPath": volume}, _mount(outside, read_only=False))]
    return []


def _claim(name: str, path: str, *, read_only: bool) -> Mounted:
    claim: Manifest = {"claimName": name}
    if read_only:
        claim["readOnly"] = True
    return {"name": "model", "persistentVolumeClaim": claim}, _mount(path, read_only=read_only)


def _image(reference: str, path: str) -> Mounted:
    return {"name": "model", "image": {"reference": reference}}, _mount(path, read_only=True)


def _mount(path: str, *, read_only: bool) -> Manifest:
    mount: Manifest = {"name": "model", "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return mount
