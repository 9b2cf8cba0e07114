"""A small planning problem with emulated engines."""

from typing import Any

from cleave.api.manifest import validate
from cleave.planner import problem_from_profile
from cleave.planner.problem import Problem


def chat(**spec: Any) -> Problem:
    """OPT-13B at 4 requests per second; `spec`: further fields of the deployment's spec."""
    defaults = {
        "model": "facebook/opt-13b",
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"type": "Emulated"},
        "workload": {
            "rate": 4,
            "promptTokens": {"mean": 300, "p90": 600},
            "outputTokens": {"mean": 60, "p90": 120},
        },
    }
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": defaults | spec,
    }
    return problem_from_profile.build_problem(validate(document))
