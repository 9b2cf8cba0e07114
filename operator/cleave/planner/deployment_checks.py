"""Checks of a deployment's model: what it allows, and what the planner does not know. Pure.

Called by `placement.choose_placement` (for every way to start a deployment), by the operator's
admission webhook and by the command line, so that all of them report the same. Emulated engines
have no weights to shard and stand in for any model.
"""

from collections.abc import Iterator

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import Connector, EngineType
from cleave.api.role import Role
from cleave.perf.model import model_shape


def explain_unknown_model(deployment: LLMDeployment, *, reads_files: bool = True) -> str | None:
    """Why the planner does not know the model's dimensions; None: it does. Without `reads_files` a
    model folder is not read."""
    model_spec = deployment.spec.model
    if deployment.spec.engine.type is EngineType.EMULATED:
        return None
    if model_spec.folder is not None and not reads_files:
        return "it is a folder, which the operator does not read"
    try:
        model_shape.load_shape(model_spec.locator)
    except model_shape.UnknownModelError as error:
        return str(error) if model_spec.folder else "it is not in Cleave's model table"
    return None


def list_parallelism_faults(
    deployment: LLMDeployment, *, reads_files: bool = True
) -> Iterator[str]:
    """Manual parallel sizes that the model, or the connector between roles, does not allow."""
    spec = deployment.spec
    if spec.placement is None or spec.engine.type is EngineType.EMULATED:
        return
    unknown = explain_unknown_model(deployment, reads_files=reads_files)
    shape = None if unknown else model_shape.load_shape(spec.model.locator)
    pools = spec.placement.manual
    for index, pool in enumerate(pools):
        tensor, pipeline = pool.parallelism.tensor, pool.parallelism.pipeline
        if shape and (reason := shape.explain_unsupported(tensor, pipeline)):
            yield f"spec.placement.manual[{index}].parallelism: {shape.name}: {reason}"
    heads = shape.shardable_kv_heads if shape else None
    explain = spec.engine.kv_connector.explain_incompatibility
    for prefill in (pool for pool in pools if pool.role is Role.PREFILL):
        for index, other in enumerate(pools):
            reason = explain(prefill.parallelism, other.parallelism, heads)
            if other.role is not Role.PREFILL and reason:
                yield f"spec.placement.manual[{index}].parallelism.tensor: {reason}"


def explain_connector_fault(deployment: LLMDeployment, *, reads_files: bool = True) -> str | None:
    """Why engines of this model would end at start with the deployment's KV connector; None: they
    would not, or the model is not known. Cleave's connector moves one kind of KV."""
    engine = deployment.spec.engine
    is_replaced = any(arg.startswith("--kv-transfer-config") for arg in engine.args)
    if engine.type is EngineType.EMULATED or is_replaced:
        return None
    if engine.kv_connector is not Connector.CLEAVE:
        return None
    if explain_unknown_model(deployment, reads_files=reads_files):
        return None
    shape = model_shape.load_shape(deployment.spec.model.locator)
    if shape.sliding_window is None:
        return None
    return (
        f"spec.engine.connector: {shape.name} has layers with a sliding window, whose KV Cleave's "
        "connector does not move; set it to Nixl"
    )


def list_warnings(deployment: LLMDeployment, *, reads_files: bool = True) -> Iterator[str]:
    """Warnings: legal settings that are probably mistakes or limit the planner."""
    spec = deployment.spec
    for field, value in spec.slo.suspicious_targets.items():
        yield (
            f"spec.slo.{field}: {value:g} is {value:g} milliseconds; are these seconds? "
            f"{value:g} s is {1000 * value:g}"
        )
    why = explain_unknown_model(deployment, reads_files=reads_files)
    if why is None:
        return
    if spec.placement is None and spec.workload is not None:
        yield (
            f"spec.model.source: {why}: nothing is planned; one prefill and one decode instance of "
            "one GPU each serve, and whether the weights fit is not known"
        )
        yield (
            "spec.placement.manual: set other instances or GPUs there; to have them planned, run "
            "`cleave plan` with a folder that holds the model's config.json as spec.model"
        )
    if spec.placement is None or spec.engine.kv_connector is not Connector.NIXL:
        return
    pools = spec.placement.manual
    for prefill in (pool.parallelism.tensor for pool in pools if pool.role is Role.PREFILL):
        for index, pool in enumerate(pools):
            if pool.role is not Role.PREFILL and pool.parallelism.tensor < prefill:
                yield (
                    f"spec.placement.manual[{index}].parallelism.tensor: {why}: with fewer than "
                    f"{prefill} KV heads no KV can be sent from prefill instances with {prefill} "
                    f"to {pool.parallelism.tensor}; spec.engine.connector Cleave takes any sizes"
                )
