"""The volumes of deployments' pods, as rules. Values only; part of `pod_table`."""

from collections.abc import Mapping

from cleave.controller.author_policy.pod_rules import (
    ANY,
    Fields,
    Folder,
    Gated,
    Items,
    Listed,
    PodRule,
    accept,
)

VOLUMES = (
    "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "csi", "ephemeral", "fc",
    "flexVolume", "flocker", "gcePersistentDisk", "glusterfs", "hostPath", "image", "iscsi", "nfs",
    "persistentVolumeClaim", "photonPersistentDisk", "portworxVolume", "quobyte", "rbd", "scaleIO",
    "storageos", "vsphereVolume",
)  # fmt: skip
"""Kinds of volumes that need policy.allow.volumes. Others are harmless, or allowed by the names of
Secrets and ConfigMaps; gitRepo, which runs a program of its repository on the node, never is."""

SECRET = Listed("secrets")
CONFIG_MAP = Listed("configMaps", ("kube-root-ca.crt",))
IMAGE = Listed("images")

_PROJECTION = Fields({
    "clusterTrustBundle": ANY,
    "configMap": Fields({"name": CONFIG_MAP, "items": ANY, "optional": ANY}, required=("name",)),
    "downwardAPI": ANY,
    "secret": Fields({"name": SECRET, "items": ANY, "optional": ANY}, required=("name",)),
    # Without an audience: what the API server mounts into every pod.
    "serviceAccountToken": Fields({"expirationSeconds": ANY, "path": ANY}),
})  # fmt: skip


def _with_secret(name: str, *others: str) -> Fields:
    """A volume whose field `name` refers to a Secret."""
    return Fields(
        {name: Fields({"name": SECRET}, required=("name",)), **dict.fromkeys(others, ANY)}
    )


_VOLUME_RULES: Mapping[str, PodRule] = {
    "azureFile": Fields({"secretName": SECRET, "shareName": ANY, "readOnly": ANY}),
    "cinder": _with_secret("secretRef", "fsType", "readOnly", "volumeID"),
    "cephfs": _with_secret("secretRef", "monitors", "path", "user", "readOnly"),
    "csi": _with_secret(
        "nodePublishSecretRef", "driver", "fsType", "readOnly", "volumeAttributes"
    ),
    "flexVolume": _with_secret("secretRef", "driver", "fsType", "options", "readOnly"),
    "hostPath": Fields({
        "path": Folder("folders"),
        "type": accept("", "Directory", "DirectoryOrCreate"),
    }),
    "image": Fields({"reference": IMAGE, "pullPolicy": ANY}, required=("reference",)),
    "iscsi": _with_secret(
        "secretRef", "chapAuthDiscovery", "chapAuthSession", "fsType", "initiatorName", "iqn",
        "iscsiInterface", "lun", "portals", "readOnly", "targetPortal",
    ),
    "rbd": _with_secret(
        "secretRef", "fsType", "image", "monitors", "pool", "readOnly", "user"
    ),
    "scaleIO": _with_secret(
        "secretRef", "fsType", "gateway", "protectionDomain", "readOnly", "sslEnabled",
        "storageMode", "storagePool", "system", "volumeName",
    ),
    "storageos": _with_secret("secretRef", "fsType", "readOnly", "volumeName", "volumeNamespace"),
}  # fmt: skip
"""Kinds of volumes that may name a Secret, an image or a folder."""

VOLUME = Fields({
    "name": ANY,
    "configMap": Fields(
        {"name": CONFIG_MAP, "items": ANY, "defaultMode": ANY, "optional": ANY},
        required=("name",),
    ),
    "downwardAPI": ANY,
    "emptyDir": ANY,
    "projected": Fields({"sources": Items(_PROJECTION), "defaultMode": ANY}),
    "secret": Fields(
        {"secretName": SECRET, "items": ANY, "defaultMode": ANY, "optional": ANY},
        required=("secretName",),
    ),
    **{kind: Gated("volumes", kind, _VOLUME_RULES.get(kind, ANY)) for kind in VOLUMES},
})  # fmt: skip
