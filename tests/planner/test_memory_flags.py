"""Arguments that change an engine's memory are counted, refused by name, or named as left out."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from cleave.api.cluster import Cluster
from cleave.api.manifest import ManifestError, validate
from cleave.api.role import Role
from cleave.perf.hardware.memory import VLLM_RESERVE
from cleave.planner import left_out, memory_flags, plan_search, problem_from_cluster
from cleave.planner.placement import PlanError
from cleave.planner.plan import PlannedPool
from cleave.planner.pool_simulation import build_fleet
from cleave.planner.problem import Problem
from cleave.planner.search import batch_limits, colocated
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    find_needed_limit,
)
from cleave.planner.search.candidates import (
    build_decode,
    build_mixed,
    build_prefill,
    list_candidates,
    list_short_of_room,
)
from cleave.simulator.fleet import Batching

L4 = Cluster.model_validate({"nodes": [{"gpu": "L4", "count": 8, "gpusPerNode": 1}]})
H100 = Cluster.model_validate({"nodes": [{"gpu": "H100", "count": 1}]})
LLAMA = "meta-llama/Llama-3.1-8B"

WITHOUT_EFFECT = {
    "--kv-cache-dtype", "--enable-prefix-caching", "--prefix-caching-hash-algo",
    "--prefix-cache-retention-interval", "--kv-offloading-size", "--kv-offloading-backend",
}  # fmt: skip
"""Of vLLM's settings of caches: those that other modules read or refuse, and those that change
neither sizes nor times of what is planned."""


def build(*args: str, cluster: Cluster = H100, model: object = LLAMA, **spec: object) -> Problem:
    return problem_from_cluster.build_problem(
        validate(
            {
                "apiVersion": "cleave.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": "chat"},
                "spec": {
                    "model": model,
                    "slo": {"ttftMs": 2000, "tpotMs": 100},
                    "engine": {"args": list(args)},
                    "workload": {
                        "rate": 0.5,
                        "promptTokens": {"mean": 500, "p90": 900},
                        "outputTokens": {"mean": 150},
                    },
                    **spec,
                },
            }
        ),
        cluster,
    )


def get_room(*args: str) -> tuple[int, int]:
    """KV in tokens and the longest request, of one instance on one GPU."""
    found = build(*args).estimator.estimate("H100-SXM-80GB", 1, 1)
    assert found is not None
    return found.kv_capacity_tokens, found.max_model_len


def find_limit(problem: Problem) -> int | None:
    """What a plan of the smallest instance sets."""
    candidate, *_ = list_candidates(problem)
    group = InstanceGroup(Role.MIXED, build_decode(problem, candidate), 1)
    return find_needed_limit(problem, CandidatePlacement((group,)))


def list_settings() -> set[str]:
    """vLLM's flags of caches and of offloading, by the fields of these settings."""
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    flags = set()
    for name in ("cache", "offload"):
        tree = ast.parse((Path(package.origin).parent / "config" / f"{name}.py").read_text())
        for field in (each for each in ast.walk(tree) if isinstance(each, ast.AnnAssign)):
            is_set_later = field.value is not None and "init=False" in ast.unparse(field.value)
            if isinstance(field.target, ast.Name) and not is_set_later:
                flags.add("--" + field.target.id.replace("_", "-"))
    return flags


def test_every_setting_of_caches_and_offloading_is_known_here() -> None:
    options = (Path(find_spec("vllm").origin).parent / "engine" / "arg_utils.py").read_text()
    flags = {"--kv-cache-dtype" if each == "--cache-dtype" else each for each in list_settings()}
    flags = {flag for flag in flags if f'"{flag}"' in options}
    assert len(flags) > 15
    known = {*memory_flags.COUNTED, *memory_flags.REFUSED, *left_out.UNCOUNTED}
    assert flags <= known | WITHOUT_EFFECT
    assert not known & WITHOUT_EFFECT
    # Each is one of vLLM's, so that none is misspelt.
    assert not [flag for flag in known if f'"{flag}"' not in options]


def test_pinned_vllms_default_share_is_planned() -> None:
    package = find_spec("vllm")
    assert package is not None
    text = (Path(package.origin).parent / "config" / "cache.py").read_text()
    assert f"gpu_memory_utilization: float = Field(default={VLLM_RESERVE.utilisation}," in text


def test_arguments_of_memory_change_the_room() -> None:
    usual, _ = get_room()
    less = get_room("--gpu-memory-utilization", "0.5")[0]
    assert less == pytest.approx(usual - 0.42 * 79.1 * 2**30 / 131_072, rel=0.01)
    assert get_room("--device-memory-utilization=0.5")[0] == less
    assert get_room("--gpu_memory_utilization=0.98")[0] > usual
    assert get_room("--enforce-eager")[0] > usual
    assert get_room("--max-num-batched-tokens=32k")[0] < usual
    assert get_room("--max-num-seqs=2048")[0] < usual
    # 16 GiB of KV, and nothing else of it.
    assert get_room("--kv-cache-memory-bytes", "16G") == (131_072, 131_056)
    assert get_room("--kv-cache-memory-bytes=10g")[0] == 10**10 // 131_072


def test_kv_that_does_not_fit_beside_the_weights_is_no_plan() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        plan_search.list_feasible(build("--kv-cache-memory-bytes=16G", cluster=L4))


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--gpu-memory-utilization", "80"], "must be above 0 and at most 1"),
        (["--gpu-memory-utilization", "most"], "must be above 0 and at most 1"),
        (["--kv-cache-memory-bytes=all"], "must be a whole number above 0"),
        (["--max-num-seqs", "many"], "must be a whole number above 0"),
        (["--max-num-seqs=0"], "must be a whole number above 0"),
        (["--block-size", "auto"], "must be a whole number above 0"),
        (["--cpu-offload-gb", "40"], "no plan counts with it; remove it, or set the instances"),
        (["--num-gpu-blocks-override=100"], "set --kv-cache-memory-bytes instead"),
        (["--decode-context-parallel-size", "2"], "no plan counts with it"),
        (["--hf-overrides", '{"max_position_embeddings": 9}'], "spec.model.config as well"),
    ],
)
def test_an_argument_that_no_plan_counts_is_one_line_with_its_name(
    args: list[str], fault: str
) -> None:
    with pytest.raises(PlanError) as refused:
        build(*args)
    (line,) = refused.value.faults
    assert line.startswith(f"spec.engine.args: {args[0].partition('=')[0]}")
    assert fault in line


@pytest.mark.parametrize("flag", left_out.UNCOUNTED)
def test_what_is_not_counted_is_named(flag: str) -> None:
    assert any(f"engine.args {flag}" in note for note in build(flag, "1").notes)


def test_values_that_change_nothing_are_taken() -> None:
    build("--cpu-offload-gb=0", "--decode-context-parallel-size", "1", "--quantization", "fp8")
    assert any(
        "--gpu-memory-utilization 0.5" in n for n in build("--gpu-memory-utilization=0.5").notes
    )


def test_limits_of_steps_are_those_of_the_arguments() -> None:
    problem = build("--max-num-seqs=48", "--max-num-batched-tokens", "4k", "--block-size=32")
    candidate, *_ = list_candidates(problem)
    engine = build_decode(problem, candidate).engine
    limits = engine.max_num_seqs, engine.max_num_batched_tokens, engine.kv_block_size
    assert limits == (48, 4000, 32)
    (placement,) = colocated.list_instances(problem, [candidate])
    assert batch_limits.list_variants(placement) == []


def test_limits_of_steps_are_those_of_the_role() -> None:
    roles = {
        "prefill": {"args": ["--max-num-batched-tokens=16k", "--enforce-eager"]},
        "decode": {"args": ["--max-num-seqs", "96"]},
    }
    engine = {"args": ["--max-num-seqs=48"], "roles": roles}
    problem = build(engine=engine)
    eager = "longer iterations without CUDA graphs (engine.roles.prefill.args --enforce-eager)"
    assert any(eager in note for note in problem.notes)
    candidate, *_ = list_candidates(problem)
    built = (
        build_prefill(problem, candidate),
        build_decode(problem, candidate),
        build_mixed(problem, candidate, Batching.VLLM),
    )
    limits = [(each.engine.max_num_seqs, each.engine.max_num_batched_tokens) for each in built]
    assert limits == [(48, 16_000), (96, 2048), (48, 2048)]
    fleet = build_fleet(problem, [PlannedPool(role, 1) for role in (Role.PREFILL, Role.DECODE)])
    given = [each.engine.max_num_seqs for each in (*fleet.prefill, *fleet.decode)]
    assert given == [48, 96]


@pytest.mark.parametrize(
    "args",
    [["--gpu-memory-utilization=0.5"], ["--max-num-batched-tokens=64k"], ["--max-num-seqs=2048"]],
)
def test_memory_is_kept_for_the_role_that_takes_most(args: list[str]) -> None:
    (usual, _), (shared, _) = get_room(), get_room(*args)
    problem = build(engine={"roles": {"decode": {"args": args}}})
    found = problem.estimator.estimate("H100-SXM-80GB", 1, 1)
    assert found is not None
    assert found.kv_capacity_tokens == shared < usual


def test_the_plan_says_which_roles_have_more_memory_and_longer_times_than_planned() -> None:
    decode = {"args": ["--gpu-memory-utilization", "0.95", "--enforce-eager", "--dbo-x=1"]}
    args = ["--gpu-memory-utilization=0.8", "--enforce_eager"]
    notes = build(engine={"args": args, "roles": {"decode": decode}}).notes
    more = "least memory that one has (--gpu-memory-utilization 0.95 of decode); engines of the"
    assert sum(more in note for note in notes) == 1
    (line,) = [note for note in notes if note.startswith("not simulated")]
    assert line.count("longer iterations without CUDA graphs (engine.args --enforce-eager)") == 1
    assert "engine.roles.decode.args --dbo-x;" in line


def test_gpus_of_prefill_context_parallelism_are_refused_at_admission() -> None:
    for arg in ("--prefill-context-parallel-size=2", "--prefill_context_parallel_size"):
        with pytest.raises(ManifestError, match="pods request no GPUs for it"):
            build(arg, "2")


def test_the_plan_bounds_requests_where_the_models_context_has_no_room() -> None:
    # vLLM ends with "To serve at least one request with the model's max seq len (131072) ...".
    result = plan_search.plan(build(cluster=L4))
    assert result.selected is not None
    limit = result.selected.max_model_len
    assert limit is not None
    assert 4_000 < limit < 30_000
    assert f"model.maxModelLen {limit:,} is set" in result.reason
    assert find_limit(build()) is None


def test_a_limit_of_the_user_leaves_out_sizes_without_room_and_says_why() -> None:
    given = {"source": LLAMA, "maxModelLen": 60_000}
    two = Cluster.model_validate({"nodes": [{"gpu": "L4", "count": 4, "gpusPerNode": 2}]})
    problem = build(cluster=two, model=given)
    assert all(each.gpus > 1 for each in list_candidates(problem))
    assert find_limit(problem) is None
    (line,) = list_short_of_room(problem)
    assert line.startswith("left out: llama-3.1-8b does not fit: a request may have 60,000 tokens")
    assert not list(list_short_of_room(build()))


def test_long_requests_of_the_traffic_leave_out_what_cannot_hold_them() -> None:
    traffic = {
        "rate": 0.5,
        "promptTokens": {"mean": 40_000, "p90": 60_000},
        "outputTokens": {"mean": 9},
    }
    with pytest.raises(
        PlanError, match=r"a request may have .* set a smaller spec\.model\.maxModel"
    ):
        plan_search.list_feasible(
            build(
                cluster=Cluster.model_validate({"nodes": [{"gpu": "L4", "gpusPerNode": 1}]}),
                workload=traffic,
            )
        )
