"""Finds features of a deployment that need a cluster. Pure; called before its pods are built.

Fields without meaning for processes (images, rollouts, gateway replicas) are ignored; fields whose
missing effect users would not notice are rejected.
"""

from collections.abc import Iterator

from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.api.model import ModelSpec
from cleave.api.planning import PlanningMode


def find_unsupported(deployment: LLMDeployment) -> list[str]:
    """Return one line per unsupported field, with the remedy; empty when all are supported."""
    return [*_check_model(deployment.spec.model), *_check_spec(deployment.spec)]


def _check_model(model: ModelSpec) -> Iterator[str]:
    cache = model.cache
    if cache is None:
        return
    if cache.persistent_volume_claim:
        yield (
            "spec.model.cache.persistentVolumeClaim: volumes need a cluster; use "
            "hostPath, or remove it to download to ~/.cache/huggingface"
        )
    if cache.image:
        yield (
            "spec.model.cache.image: images need a cluster; set "
            "spec.model.source to the folder of the model"
        )
    if cache.host_path and model.folder not in (None, cache.host_path.path):
        yield (
            f"spec.model.cache.hostPath.path: {cache.host_path.path} cannot be mounted at "
            f"{model.folder} without a cluster; set spec.model.source to it"
        )


def _check_spec(spec: LLMDeploymentSpec) -> Iterator[str]:
    if spec.gateway.keys_secret:
        yield (
            "spec.gateway.keysSecret: there are no Secrets without a cluster; remove it, or run "
            "cleave gateway --api-keys FILE beside the workers"
        )
    if spec.gateway.tls_secret:
        yield (
            "spec.gateway.tlsSecret: there are no Secrets without a cluster; remove it, or run "
            "cleave gateway --tls-cert FILE --tls-key FILE beside the workers"
        )
    if spec.gateway.endpoint_picker:
        yield (
            "spec.gateway.endpointPicker: its proxies need a cluster; remove it, or run "
            "cleave gateway --endpoint-picker-port PORT beside the workers"
        )
    if spec.gateway.endpoint_picker_tls_secret:
        yield (
            "spec.gateway.endpointPickerTlsSecret: there are no Secrets without a cluster; remove "
            "it, or run cleave gateway --endpoint-picker-cert FILE beside the workers"
        )
    if spec.routing.lengths_config_map:
        yield (
            "spec.routing.lengthsConfigMap: there are no ConfigMaps without a cluster; remove it, "
            "or run cleave gateway --lengths FILE beside the workers"
        )
    for variable in spec.engine.env:
        if variable.value_from:
            yield (
                f"spec.engine.env.{variable.name}: there are no Secrets without a cluster; remove "
                "it and export the variable: workers get this terminal's environment"
            )
    if spec.paused:
        yield "spec.paused: no pod would be started; remove it"
    if spec.planning.mode is PlanningMode.ADVISORY:
        yield "spec.planning.mode: Advisory applies no plan; use cleave plan, or mode Auto"
