"""Planning problems of a model whose experts need several GPUs: DeepSeek-V3 on H200."""

from collections.abc import Sequence

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.planner import problem_from_cluster
from cleave.planner.problem import Problem

WIDE_ARGS = ("--all2all-backend=deepep_v2", "--enable-eplb")


def deepseek(
    rate: float = 20.0,
    nodes: int = 8,
    args: Sequence[str] = WIDE_ARGS,
    model: str = "deepseek-ai/DeepSeek-V3",
    gpu: str = "H200",
    **group: int,
) -> Problem:
    """Prompts of 2,000 tokens and outputs of 500 on nodes of eight GPUs, or as `group` says."""
    network = {"kind": "InfiniBand", "bandwidthGbps": 400}
    cluster = Cluster.model_validate(
        {"nodes": [{"count": nodes, "gpu": gpu, **group}], "network": network}
    )
    deployment = LLMDeployment.model_validate(
        {
            "metadata": {"name": "wide"},
            "spec": {
                "model": model,
                "engine": {"args": list(args)},
                "workload": {
                    "rate": rate,
                    "promptTokens": {"mean": 2000, "p90": 3600},
                    "outputTokens": {"mean": 500, "p90": 950},
                },
                "slo": {"ttftMs": 2000, "tpotMs": 50},
            },
        }
    )
    return problem_from_cluster.build_problem(deployment, cluster)
