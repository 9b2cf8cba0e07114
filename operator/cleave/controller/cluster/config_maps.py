"""Reads the ConfigMaps with the config.json of models. Used by the controller.

They are read by name when their deployment is reconciled: a watch would need every ConfigMap of the
cluster.
"""

from cleave.controller.cluster.cache import ReadConfigMap
from cleave.controller.cluster.client import KubeApiError, KubeClient

_FORBIDDEN, _NOT_FOUND = 403, 404


async def read_config_map(kube: KubeClient, namespace: str, name: str) -> ReadConfigMap:
    """One ConfigMap, or why there is none. Raises KubeApiError when it is worth another try."""
    try:
        data = (await kube.get("ConfigMap", namespace, name)).get("data")
    except KubeApiError as error:
        where = f"ConfigMap {name} of namespace {namespace}"
        if error.status == _NOT_FOUND:
            return ReadConfigMap(name, fault=f"{where} does not exist; create it", is_missing=True)
        if error.status == _FORBIDDEN:
            why = "may not be read by the operator, whose role needs get of configmaps"
            return ReadConfigMap(name, fault=f"{where} {why}")
        raise
    return ReadConfigMap(name, data or {})
