"""The dimensions of a deployment's model as its engines load it: with what their arguments change.

Called for the planner's problem and by the operator, which compares them with what engines report.
"""

from cleave.api.deployment import LLMDeployment
from cleave.perf.model import model_source
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.planner.placement import PlanError

_SHAPE_FLAGS = {
    "--quantization": ModelShape.with_quantization,
    "--kv-cache-dtype": ModelShape.with_kv_dtype,
    "--speculative-config": ModelShape.with_speculation,
}
"""Engine arguments that change what a model's weights and KV take."""


def load_shape(deployment: LLMDeployment) -> ModelShape:
    """The model's dimensions as its engines load it. Raises PlanError."""
    model_spec = deployment.spec.model
    try:
        shape = model_source.load_shape(model_spec)
    except UnknownModelError as error:
        why = str(error)
        if why == model_source.NOT_IN_TABLE:
            why = (
                f"{model_spec.source!r} is not in Cleave's model table; {model_source.REMEDY}, or "
                "give a folder that holds it as source"
            )
        raise PlanError([f"{model_spec.shape_field}: {why}"]) from error
    engine = deployment.spec.engine
    for flag, change in _SHAPE_FLAGS.items():
        value = engine.get_flag_value(flag)
        try:
            shape = change(shape, value) if value is not None else shape
        except ValueError as error:
            raise PlanError([f"spec.engine.args: {flag} {error}"]) from error
    return shape
