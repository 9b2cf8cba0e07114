"""What engines draft: arguments and the acceptance length, and their faults."""

import json

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.perf.model.model_shape import load_shape
from cleave.planner.placement import PlanError
from cleave.planner.speculation import describe_speculation, find_speculation

SHAPE = load_shape("opt-13b")


def deployment(length: float | None, config: object) -> LLMDeployment:
    text = config if isinstance(config, str) else json.dumps(config)
    spec: dict[str, object] = {
        "model": "facebook/opt-13b",
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"args": ["--speculative-config", text]} if config else {},
        "planning": {} if length is None else {"acceptanceLength": length},
    }
    manifest = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    return validate({**manifest, "metadata": {"name": "chat"}, "spec": spec})


def test_eagle_computes_a_layer_and_the_head_for_each_draft() -> None:
    config = {"method": "eagle3", "model": "org/eagle", "num_speculative_tokens": 3}
    found = find_speculation(deployment(2.4, config).spec, SHAPE)
    assert found is not None
    assert (found.tokens, found.acceptance_length) == (3, 2.4)
    assert found.context_share == 1 / 40
    # 50,272 x 5,120 of 12.8 billion, and a 40th of the rest.
    assert found.draft_share == pytest.approx(0.02 + 0.98 / 40, rel=0.02)


@pytest.mark.parametrize(
    ("method", "is_free"), [("ngram", True), ("suffix", True), ("medusa", False)]
)
def test_drafts_without_layers_cost_a_head_or_nothing(method: str, is_free: bool) -> None:
    config = {"method": method, "num_speculative_tokens": 3}
    found = find_speculation(deployment(1.5, config).spec, SHAPE)
    assert found is not None
    assert found.context_share == 0
    assert (found.draft_share == 0) is is_free


@pytest.mark.parametrize(
    ("length", "config", "fault"),
    [
        (2.0, None, "no tokens are drafted without --speculative-config in spec.engine.args"),
        (2.0, "{", "no tokens are drafted without --speculative-config in spec.engine.args"),
        (2.0, {"method": "mtp"}, "needs num_speculative_tokens, a whole number from 1"),
        (2.0, {"num_speculative_tokens": "2"}, "(got '2')"),
        (3.5, {"num_speculative_tokens": 2}, "must be at most 3, as 2 tokens are drafted"),
    ],
)
def test_lengths_that_cannot_be_are_refused(length: float, config: object, fault: str) -> None:
    with pytest.raises(PlanError) as raised:
        find_speculation(deployment(length, config).spec, SHAPE)
    (found,) = raised.value.faults
    assert found.startswith("spec.planning.acceptanceLength: ")
    assert fault in found


def test_a_deployment_says_what_its_plan_leaves_out() -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    draft = {"model": "org/small", "num_speculative_tokens": 3}
    assert describe_speculation(deployment(None, None).spec) is None
    assert find_speculation(deployment(None, mtp).spec, SHAPE) is None
    assert "no accepted tokens" in str(describe_speculation(deployment(None, mtp).spec))
    assert describe_speculation(deployment(1.8, mtp).spec) is None
    assert "not the time of the drafting model" in str(
        describe_speculation(deployment(1.8, draft).spec)
    )
