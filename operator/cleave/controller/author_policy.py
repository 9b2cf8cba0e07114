"""What authors of deployments and pools may ask of the operator, which creates their pods. Pure.

Called by the webhook and, as that may be away, before each reconcile. Who may write a deployment
may otherwise have any image, argument, folder of a node and Secret of the namespace in a pod,
without the right to create pods.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool


@dataclass(frozen=True, slots=True)
class AuthorPolicy:
    """By default everything is allowed that the API has fields for."""

    allows_host_paths: bool = True
    allows_host_network: bool = True
    allows_secrets: bool = True
    """Whether engines may get values of Secrets, as variables or volumes."""
    allowed_images: tuple[str, ...] = ()
    """Prefixes of image names; empty: all."""
    denied_engine_args: tuple[str, ...] = ()
    """Flags of the engine, also where a field adds one: parallelism.expert and parallelism.data. If
    there are any, configuration files of the engine are denied, too."""


ALLOW_ALL = AuthorPolicy()


def list_violations(resource: LLMDeployment | InstancePool, policy: AuthorPolicy) -> Iterator[str]:
    """Yield a line `path: what is wrong` for each field that asks for more than is allowed."""
    spec = resource.spec
    model, engine, template = spec.model, spec.engine, spec.template
    images = {"spec.engine.image": engine.image}
    if isinstance(resource, LLMDeployment):
        images["spec.gateway.image"] = resource.spec.gateway.image
    if model.cache and model.cache.image:
        images["spec.model.cache.image.reference"] = model.cache.image.reference
    for path, image in images.items():
        if image and policy.allowed_images and not image.startswith(policy.allowed_images):
            allowed = ", ".join(policy.allowed_images)
            yield f"{path}: the operator's policy allows images that begin with {allowed}"
    # A configuration file may hold any flag.
    files = ("--config",) if policy.denied_engine_args else ()
    for flag in policy.denied_engine_args + files:
        if engine.has_flag(flag):
            yield f"spec.engine.args: the operator's policy denies {flag}"
        for path, added in _list_added_flags(resource):
            if flag.replace("_", "-") == added:
                yield f"{path}: the operator's policy denies {flag}, which it adds"
    if resource.spec.adapters and {"--enable-lora", "--lora-modules"} & {
        *policy.denied_engine_args
    }:
        yield "spec.adapters: the operator's policy denies LoRA adapters"
    volumes = {volume.name: volume.model_dump() for volume in template.volumes}
    if not policy.allows_host_paths:
        cache = model.cache
        if (cache and cache.host_path) or (model.folder and cache is None):
            yield "spec.model: the operator's policy denies folders of nodes"
        yield from _list_denied_volumes(volumes, "hostPath")
    if not policy.allows_secrets:
        for variable in engine.env:
            if variable.value_from is not None:
                yield f"spec.engine.env.{variable.name}: the operator's policy denies Secrets"
        for kind in ("secret", "projected", "csi"):
            yield from _list_denied_volumes(volumes, kind)
    if template.host_network and not policy.allows_host_network:
        yield "spec.template.hostNetwork: the operator's policy denies it"


def _list_added_flags(resource: LLMDeployment | InstancePool) -> Iterator[tuple[str, str]]:
    """Yield the fields in which an author has chosen what a flag of the engine says, with the flag.
    Not tensor and pipeline sizes: every engine has those flags, and plans choose them, too."""
    if isinstance(resource, InstancePool):
        sizes = {"spec.parallelism": resource.spec.parallelism}
        for index, member in enumerate(resource.spec.members):
            sizes[f"spec.members[{index}].parallelism"] = member.parallelism
    else:
        pools = resource.spec.placement.manual if resource.spec.placement else []
        sizes = {
            f"spec.placement.manual[{index}].parallelism": pool.parallelism
            for index, pool in enumerate(pools)
        }
    for path, size in sizes.items():
        if size.expert:
            yield f"{path}.expert", "--enable-expert-parallel"
        if size.data > 1:
            yield f"{path}.data", "--data-parallel-size"


def _list_denied_volumes(volumes: dict[str, dict[str, object]], kind: str) -> Iterator[str]:
    for name, volume in volumes.items():
        if kind in volume:
            yield f"spec.template.volumes.{name}: the operator's policy denies {kind}"
