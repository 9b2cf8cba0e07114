"""Volumes of a worker: scratch space, and the model's files. Pure.

A model is given as a repository or as a folder, and kept on the node, in a volume or in an image;
each combination determines the path that the engine loads.
"""

import re
from collections.abc import Iterable, Mapping

from cleave.api.engine import EngineSpec, EnvVar
from cleave.api.model import ModelSpec
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.distribution import get_version
from cleave.manifests.container import HOME_FOLDER, build_scratch_volume
from cleave.manifests.labels import Manifest

_COMPILE_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Environment variables with folders of compiled kernels."""
_HUB_TOKEN = "HF_TOKEN"  # noqa: S105 - the name of a variable
_HUB_TOKEN_VOLUME = "cleave-hub-token"  # noqa: S105 - a name
_HUB_TOKEN_FOLDER = "/etc/cleave/hub-token"  # noqa: S105 - a folder
HUB_CACHE_FOLDER = "/var/cache/cleave"
"""Mount path of a volume with a Hugging Face cache."""
IMAGE_MODEL_FOLDER = "/model"
"""Mount path of an image with a model's files, unless the source names a folder."""

VolumeAndMount = tuple[Manifest, Manifest]
"""A volume and its mount."""


def build_storage(
    model: ModelSpec, template: WorkerTemplate, engine: EngineSpec
) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of a worker."""
    token = build_token_volume(engine)
    pairs = [
        build_scratch_volume("tmp", "/tmp"),  # noqa: S108 - a mount inside the container
        build_scratch_volume("home", HOME_FOLDER),
        # An engine's processes share memory; the default of 64 MiB is too small.
        build_scratch_volume("shm", "/dev/shm", medium="Memory"),  # noqa: S108
        *_list_model_mounts(model),
        *([token] if token else []),
    ]
    volumes, mounts = zip(*pairs, strict=True)
    own_volumes = [volume.model_dump() for volume in template.volumes]
    own_mounts = [mount.model_dump() for mount in template.volume_mounts]
    return [*volumes, *own_volumes], [*mounts, *own_mounts]


def limit_scratch(volumes: Iterable[Manifest], sizes: Mapping[str, str]) -> list[Manifest]:
    """The volumes with these limits of empty directories, by name."""
    return [
        {**each, "emptyDir": {**each["emptyDir"], "sizeLimit": sizes[each["name"]]}}
        if "emptyDir" in each and each["name"] in sizes
        else each
        for each in volumes
    ]


def build_token_volume(engine: EngineSpec) -> VolumeAndMount | None:
    """The Secret that HF_TOKEN refers to as a file, which child processes do not inherit and no
    listing of the environment shows; None: there is none."""
    for variable in engine.env:
        if variable.name == _HUB_TOKEN and variable.value_from is not None:
            key = variable.value_from.secret_key_ref
            items = [{"key": key.key, "path": "token"}]
            # The group of the pod may read it.
            secret = {"secretName": key.name, "items": items, "defaultMode": 0o440}
            secret |= {"optional": True} if key.optional else {}
            mount = {"name": _HUB_TOKEN_VOLUME, "mountPath": _HUB_TOKEN_FOLDER, "readOnly": True}
            return {"name": _HUB_TOKEN_VOLUME, "secret": secret}, mount
    return None


def convert_token_variable(variable: EnvVar) -> Manifest | None:
    """The variable that names the file of `build_token_volume`; None: it is another variable."""
    if variable.name != _HUB_TOKEN or variable.value_from is None:
        return None
    return {"name": "HF_TOKEN_PATH", "value": f"{_HUB_TOKEN_FOLDER}/token"}


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


def is_downloaded(model: ModelSpec) -> bool:
    """Whether each pod downloads the model into its own disk space."""
    return model.folder is None and model.cache is None


def list_compile_caches(model: ModelSpec, gpu: str | None) -> dict[str, str]:
    """Folders for compiled kernels beside the downloaded models, by environment variable, so that
    the next pod starts sooner. Empty: the folder is read-only or there is none.

    vLLM 0.32 does not distinguish kernels of different GPUs, so each kind (`gpu`) has a folder of
    its own. A volume for several nodes holds no kernels for an unknown kind; on a node it is one.
    """
    folder, cache = get_hub_cache(model), model.cache
    if folder is None or cache is None or not (gpu or cache.host_path):
        return {}
    if cache.persistent_volume_claim and cache.persistent_volume_claim.read_only:
        return {}
    kind = re.sub("[^a-z0-9]+", "-", (gpu or "gpu").lower())
    return {
        name: f"{folder}/compiled/{get_version()}/{kind}/{part}"
        for name, part in _COMPILE_CACHES.items()
    }


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
