"""What a deployment's engines draft, by vLLM's `--speculative-config` and
`planning.acceptanceLength`. Pure.

Called for the planner's problem.
"""

from collections.abc import Mapping

from cleave.api.deployment import LLMDeploymentSpec
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.speculation import Speculation
from cleave.planner.connector_choice import (
    METHODS_OF_HEADS,
    METHODS_WITHOUT_LAYERS,
    SPECULATION_FLAG,
    read_speculation,
)
from cleave.planner.placement import PlanError

_FIELD = "spec.planning.acceptanceLength"
_DRAFT_MODEL = "draft_model"


def find_speculation(spec: LLMDeploymentSpec, shape: ModelShape) -> Speculation | None:
    """The drafts of a deployment's engines; None: it gives no acceptance length, so plans count
    with none. Raises PlanError."""
    length, config = spec.planning.acceptance_length, read_speculation(spec.engine)
    if length is None:
        return None
    if config is None:
        fault = (
            f"no tokens are drafted without {SPECULATION_FLAG} in spec.engine.args; add it, or "
            "remove this"
        )
        raise PlanError([f"{_FIELD}: {fault}"])
    tokens = config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        fault = (
            "needs num_speculative_tokens, a whole number from 1, in "
            f"{SPECULATION_FLAG} (got {tokens!r})"
        )
        raise PlanError([f"{_FIELD}: {fault}"])
    if length > tokens + 1:
        fault = (
            f"must be at most {tokens + 1}, as {tokens} tokens are drafted for an iteration that "
            f"emits one more (got {length:g}); vLLM logs it as the mean acceptance length"
        )
        raise PlanError([f"{_FIELD}: {fault}"])
    return Speculation(tokens, length, *_estimate_shares(config, shape))


def describe_speculation(spec: LLMDeploymentSpec) -> str | None:
    """A sentence about drafts that the plan does not count; None: there are none."""
    if spec.engine.get_flag_value(SPECULATION_FLAG) is None:
        return None
    counted = f"spec.engine.args: {SPECULATION_FLAG}: the plan counts"
    if spec.planning.acceptance_length is None:
        return (
            f"{counted} the weights and KV of multi-token prediction layers, no other drafts, and "
            f"no accepted tokens; {_FIELD} gives their number"
        )
    config = read_speculation(spec.engine) or {}
    if config.get("method", _DRAFT_MODEL) == _DRAFT_MODEL:
        return f"{counted} accepted tokens, and not the time of the drafting model"
    return None


def _estimate_shares(config: Mapping[str, object], shape: ModelShape) -> tuple[float, float]:
    """Time of one draft as a share of a decode iteration, and of its attention: EAGLE and
    multi-token prediction compute one layer like the model's and the LM head; a draft model is not
    known."""
    method = config.get("method", _DRAFT_MODEL)
    if method in METHODS_WITHOUT_LAYERS or method == _DRAFT_MODEL:
        return 0.0, 0.0
    head = shape.lm_head_parameters
    computed = shape.active_parameters - shape.embedding_parameters
    head_share = head / max(computed, head)
    if method in METHODS_OF_HEADS:
        return head_share, 0.0
    layer = 1 / shape.num_layers
    return head_share + (1 - head_share) * layer, layer
