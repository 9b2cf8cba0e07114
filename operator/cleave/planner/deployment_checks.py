"""Checks of a deployment's model: what it allows, and what the planner does not know. Pure.

Called by `ResolvedDeployment`, which keeps the answers. `shape`: of the deployment's model; None:
not known, or engines are emulated: they have no weights to shard and stand in for any model.
"""

from collections import Counter
from collections.abc import Iterator

from cleave.api.deployment import LLMDeploymentSpec
from cleave.api.engine import NO_PREFIX_CACHING, Connector, EngineType
from cleave.api.model import Dtype
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.role import Role
from cleave.perf.model import model_source
from cleave.perf.model.model_shape import ModelShape
from cleave.planner import argument_checks, template_checks
from cleave.planner.connector_choice import ConnectorChoice

_METHODS_WITH_FLOAT32 = ("compressed-tensors", "torchao", "bitsandbytes", "gguf")
"""Of vLLM's quantisation (`get_supported_act_dtypes`)."""


def list_start_faults(spec: LLMDeploymentSpec, shape: ModelShape | None) -> Iterator[str]:
    """Settings with which no pod is created, no engine starts, or nothing could be requested."""
    yield from template_checks.list_template_faults(spec.template)
    yield from _name_pools(spec, argument_checks.list_argument_faults(spec.engine))
    if fault := _find_model_fault(spec, shape):
        yield fault


def _name_pools(spec: LLMDeploymentSpec, lines: Iterator[str]) -> Iterator[str]:
    """Yield lines about `engine.roles` with the pool's field where that is what the user wrote."""
    written = {
        f"spec.engine.roles.{pool.role}.": f"spec.placement.manual[{index}]."
        for index, pool in enumerate(spec.manual_pools)
        if pool.sets_engine
    }
    for line in lines:
        field = next(filter(line.startswith, written), "")
        yield written.get(field, "") + line.removeprefix(field)


def _find_model_fault(spec: LLMDeploymentSpec, shape: ModelShape | None) -> str | None:
    """Why no engine starts with this model, or an adapter could never be requested; None: neither
    is known."""
    names = Counter([spec.model.name, *spec.gateway.model_aliases])
    if twice := [name for name, count in names.items() if count > 1]:
        return f"spec.gateway.modelAliases: {twice[0]} names the model already; remove it"
    if taken := [each.name for each in spec.adapters if each.name in names]:
        return f"spec.adapters: {taken[0]} is the name of the model itself; choose another name"
    if spec.model.dtype != Dtype.FLOAT32 or shape is None:
        return None
    own = shape.quantization
    method = own.method if own else spec.engine.get_flag_value("--quantization")
    if method is None or method in _METHODS_WITH_FLOAT32:
        return None
    return f"spec.model.dtype: vLLM does not compute {method} weights with float32; leave it out"


def list_parallelism_faults(
    spec: LLMDeploymentSpec, shape: ModelShape | None, connector: Connector
) -> Iterator[str]:
    """Manual parallel sizes that the model, or the connector between roles, does not allow."""
    if spec.placement is None or spec.engine.type is EngineType.EMULATED:
        return
    pools = spec.placement.manual
    is_mig = "/mig-" in spec.template.gpu_resource
    for index, pool in enumerate(pools):
        if is_mig and pool.parallelism.gpus > 1:
            yield (
                f"spec.placement.manual[{index}].parallelism: an instance cannot be distributed "
                f"over {spec.template.gpu_resource}, as CUDA programs see one MIG device; set "
                "tensor and pipeline to 1"
            )
        size = pool.parallelism
        reason = shape and shape.explain_unsupported(
            size.tensor, size.pipeline, size.data, expert=size.expert
        )
        if shape and reason:
            yield f"spec.placement.manual[{index}].parallelism: {shape.name}: {reason}"
    heads = shape.shardable_kv_heads if shape else None
    # Cleave's connector takes any sizes, but one kind of KV.
    has_other = shape is None or shape.has_one_kind_of_cache
    remedy = ", or spec.engine.connector Cleave" if has_other else ""
    for prefill in (pool for pool in pools if pool.role is Role.PREFILL):
        for index, other in enumerate(pools):
            reason = connector.explain_incompatibility(
                prefill.parallelism, other.parallelism, heads
            )
            if other.role is not Role.PREFILL and reason:
                yield f"spec.placement.manual[{index}].parallelism.tensor: {reason}{remedy}"


def describe_gpu_parts(template: WorkerTemplate) -> str | None:
    """A sentence about parts of GPUs, which the planner does not know; None: whole GPUs."""
    if not template.has_gpu_parts:
        return None
    return (
        f"spec.template.gpuResource {template.gpu_resource}: the plan is for whole GPUs; describe "
        "the part under gpus in the cluster file and name it in nodes, or set instances in "
        "spec.placement.manual"
    )


def list_reuse_doubts(spec: LLMDeploymentSpec) -> Iterator[str]:
    """Conversations in spec.workload of which nothing can repeat."""
    workload = spec.workload
    if workload is None or workload.reuse is None:
        return
    new, prompts = workload.reuse.new_tokens, workload.prompt_tokens
    if prompts is not None and new >= prompts.mean:
        yield (
            f"spec.workload.reuse: newTokens {new:,.0f} leave nothing of a mean prompt of "
            f"{prompts.mean:,.0f} tokens to repeat; promptTokens counts whole prompts, with the "
            "conversation so far"
        )
    if spec.engine.has_flag(NO_PREFIX_CACHING):
        yield (
            f"spec.workload.reuse: has no effect with {NO_PREFIX_CACHING} in spec.engine.args, as "
            "engines compute each prompt whole; remove one of them"
        )


def list_gpu_overrides(template: WorkerTemplate) -> Iterator[str]:
    """A warning about GPUs in template.resources. It is no fault, as stored resources may have them
    from before there was this check, and their pods must still be replaced."""
    name = template.gpu_resource
    if name and name in {*template.resources.limits, *template.resources.requests}:
        yield (
            f"spec.template.resources: {name} replaces the number that the parallelism of an "
            "instance needs; remove it"
        )


def list_warnings(
    spec: LLMDeploymentSpec, choice: ConnectorChoice, unknown_model: str | None, *, in_cluster: bool
) -> Iterator[str]:
    """Legal settings that are probably mistakes or limit the planner. `unknown_model`: why its
    dimensions are not known; None: they are."""
    for field, value in spec.slo.suspicious_targets.items():
        yield (
            f"spec.slo.{field}: {value:g} is {value:g} milliseconds; are these seconds? "
            f"{value:g} s is {1000 * value:g}"
        )
    yield from _name_pools(spec, argument_checks.list_argument_warnings(spec.engine))
    yield from list_reuse_doubts(spec)
    yield from list_gpu_overrides(spec.template)
    if spec.flipping is not spec.pools.flipping:
        yield (
            "spec.pools.flipping: prefill and decode engines differ (spec.engine.roles), so no "
            "instance changes its role while it runs; set Off to leave out this warning"
        )
    if chosen := choice.describe():
        yield f"spec.engine.connector: {chosen}; name it to leave out this warning"
    config = spec.model.config
    # The operator reads the ConfigMap, which may come later, and says in the status if it cannot.
    is_read_later = in_cluster and config is not None and config.inline is None
    if unknown_model is None or is_read_later:
        return
    if spec.placement is None and spec.workload is not None:
        until = " until the first engine has reported the model" if in_cluster else ""
        yield (
            f"{spec.model.shape_field}: {unknown_model}: nothing is planned{until}; one prefill "
            "and one decode instance of one GPU each serve, and whether the weights fit is not "
            "known"
        )
        yield (
            f"spec.model.config: to have the model planned now, {model_source.REMEDY}; or set the "
            "instances in spec.placement.manual"
        )
    if spec.placement is None or choice.connector is not Connector.NIXL:
        return
    pools = spec.placement.manual
    for prefill in (pool.parallelism.tensor for pool in pools if pool.role is Role.PREFILL):
        for index, pool in enumerate(pools):
            if pool.role is not Role.PREFILL and pool.parallelism.tensor < prefill:
                yield (
                    f"spec.placement.manual[{index}].parallelism.tensor: {unknown_model}: with "
                    f"fewer than {prefill} KV heads no KV can be sent from prefill instances with "
                    f"{prefill} to {pool.parallelism.tensor}; spec.engine.connector Cleave takes "
                    "any sizes"
                )
