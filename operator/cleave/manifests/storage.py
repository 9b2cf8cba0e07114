"""Volumes of a worker: scratch space, and the model's files. Pure.

A model is given as a repository or as a folder, and kept on the node, in a volume or in an image;
each combination determines the path that the engine loads.
"""

from cleave.api.model import ModelSpec
from cleave.manifests.container import HOME_FOLDER, build_scratch_volume
from cleave.manifests.labels import Manifest

HUB_CACHE_FOLDER = "/var/cache/cleave"
"""Mount path of a volume with a Hugging Face cache."""
IMAGE_MODEL_FOLDER = "/model"
"""Mount path of an image with a model's files, unless the source names a folder."""

VolumeAndMount = tuple[Manifest, Manifest]
"""A volume and its mount."""


def build_storage(model: ModelSpec) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of a worker."""
    pairs = [
        build_scratch_volume("tmp", "/tmp"),  # noqa: S108 - a mount inside the container
        build_scratch_volume("home", HOME_FOLDER),
        # An engine's processes share memory; the default of 64 MiB is too small.
        build_scratch_volume("shm", "/dev/shm", medium="Memory"),  # noqa: S108
        *_list_model_mounts(model),
    ]
    volumes, mounts = zip(*pairs, strict=True)
    return list(volumes), list(mounts)


def get_loaded_path(model: ModelSpec) -> str:
    """The model that the engine loads: a repository id, or a folder inside the container."""
    if model.cache and model.cache.image:
        return model.folder or IMAGE_MODEL_FOLDER
    return model.locator


def get_hub_cache(model: ModelSpec) -> str | None:
    """Folder for downloads (HF_HOME); None: the container's own, lost when it ends."""
    cache = model.cache
    if cache is None or model.folder or cache.image:
        return None
    return cache.host_path.path if cache.host_path else HUB_CACHE_FOLDER


def _list_model_mounts(model: ModelSpec) -> list[VolumeAndMount]:
    """The volume with the model's files, or for downloads; empty: there is none."""
    cache, folder = model.cache, model.folder
    outside = cache.host_path.path if cache and cache.host_path else None
    volume: Manifest
    if cache and cache.image:
        volume = {"image": {"reference": cache.image.reference}}
        path, read_only = folder or IMAGE_MODEL_FOLDER, {"readOnly": True}
    elif cache and (claim := cache.persistent_volume_claim):
        read_only = {"readOnly": True} if claim.read_only or folder else {}
        volume = {"persistentVolumeClaim": {"claimName": claim.claim_name, **read_only}}
        path = folder or HUB_CACHE_FOLDER
    elif folder:
        volume = {"hostPath": {"path": outside or folder, "type": "Directory"}}
        path, read_only = folder, {"readOnly": True}
    elif outside:
        # The same path inside as outside, as it is without containers.
        volume = {"hostPath": {"path": outside, "type": "DirectoryOrCreate"}}
        path, read_only = outside, {}
    else:
        return []
    return [({"name": "model", **volume}, {"name": "model", "mountPath": path, **read_only})]
