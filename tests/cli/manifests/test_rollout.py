"""`cleave rollout`: the steps of a change, from two files or from a status."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cleave.api.manifest import load
from cleave.cli.main import app

from tests.support.built_pools import hash_revision

PAIRS = [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 3}]


def manifest(
    folder: Path,
    name: str,
    pools: list[dict[str, Any]] | None = None,
    *,
    image: str = "old:1",
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> Path:
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": "facebook/opt-13b",
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "engine": {"type": "Emulated", "image": image},
            "placement": {"manual": pools or PAIRS},
            **spec,
        },
    }
    if status is not None:
        document["status"] = status
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def seen(rev: str, *counts: tuple[str, int, int, int]) -> dict[str, Any]:
    """A status: role, replicas, ready, updated."""
    keys = ("role", "replicas", "ready", "updated")
    return {
        "plan": {"revision": rev, "reason": "stated by hand", "gpus": 5},
        "roles": [dict(zip(keys, each, strict=True)) for each in counts],
    }


def run(cli: CliRunner, new: Path, *arguments: object, **options: Any) -> Result:
    line = ["rollout", "-f", str(new), *map(str, arguments)]
    return cli.invoke(app, line, **options)


def steps(result: Result) -> list[tuple[int, ...]]:
    """New and old of every role, step by step; the first is what is there."""
    assert result.exit_code == 0, result.output
    return [
        tuple(count for role in step["roles"].values() for count in (role["new"], role["old"]))
        for step in json.loads(result.stdout)["steps"]
    ]


def test_another_image_replaces_pairs(cli: CliRunner, tmp_path: Path) -> None:
    old, new = manifest(tmp_path, "old"), manifest(tmp_path, "new", image="new:2")
    result = run(cli, new, "--from", old, "-o", "json")
    assert steps(result) == [
        (0, 2, 0, 3),
        (1, 2, 1, 3),
        (1, 2, 1, 2),
        (1, 2, 2, 2),
        (1, 1, 2, 2),
        (2, 1, 2, 2),
        (2, 1, 2, 1),
        (2, 1, 3, 1),
        (2, 0, 3, 0),
    ]
    output = json.loads(result.stdout)
    assert output["revision"] == {"from": hash_revision(load(old)), "to": hash_revision(load(new))}
    assert min(step["capacity"] for step in output["steps"]) == 1
    assert output["steps"][1]["roles"]["prefill"] == {
        "new": 1,
        "old": 2,
        "started": 1,
        "stopped": 0,
    }


def test_the_table_has_a_line_per_step(cli: CliRunner, tmp_path: Path) -> None:
    mixed = [{"role": "mixed", "replicas": 1}]
    old, new = manifest(tmp_path, "old", mixed), manifest(tmp_path, "new", mixed, image="new:2")
    result = run(cli, new, "--from", old)
    assert result.exit_code == 0, result.output
    summary, heading, *rows = result.stdout.splitlines()
    assert summary == (
        f"chat: revision {hash_revision(load(old))} -> {hash_revision(load(new))}; "
        "2 steps with maxSurge 1, maxUnavailable 0; at most 2 mixed instances at a time"
    )
    assert heading.split() == ["STEP", "MIXED", "CAPACITY", "WHAT"]
    assert [row.split() for row in rows] == [
        ["now", "0+1", "100", "%"],
        ["1", "1+1", "100", "%", "start", "1", "mixed"],
        ["2", "1+0", "100", "%", "drain", "1", "mixed"],
    ]


def test_a_change_of_numbers_replaces_nothing(cli: CliRunner, tmp_path: Path) -> None:
    old = manifest(tmp_path, "old")
    new = manifest(
        tmp_path, "new", [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 5}]
    )
    assert steps(run(cli, new, "--from", old, "-o", "json")) == [(2, 0, 3, 0), (1, 0, 5, 0)]


def test_instances_that_could_change_pools_instead_are_spoken_of(
    cli: CliRunner, tmp_path: Path
) -> None:
    old = manifest(tmp_path, "old")
    swapped = [{"role": "prefill", "replicas": 3}, {"role": "decode", "replicas": 2}]
    result = run(cli, manifest(tmp_path, "new", swapped), "--from", old)
    assert "without a restart" in result.stdout
    other = run(cli, manifest(tmp_path, "other", swapped, image="new:2"), "--from", old)
    assert "without a restart" not in other.stdout
    more = [{"role": "prefill", "replicas": 3}, {"role": "decode", "replicas": 3}]
    grown = run(cli, manifest(tmp_path, "grown", more), "--from", old)
    assert "without a restart" not in grown.stdout


def test_other_roles_come_before_the_old_ones_go(cli: CliRunner, tmp_path: Path) -> None:
    old = manifest(tmp_path, "old")
    new = manifest(tmp_path, "new", [{"role": "mixed", "replicas": 2}], image="new:2")
    assert steps(run(cli, new, "--from", old, "-o", "json")) == [
        (0, 2, 0, 3, 0, 0),
        (0, 2, 0, 3, 2, 0),
        (0, 0, 0, 0, 2, 0),
    ]


def test_an_empty_rollout_is_reported(cli: CliRunner, tmp_path: Path) -> None:
    old = manifest(tmp_path, "old")
    result = run(cli, old, "--from", old)
    assert result.exit_code == 0
    assert (
        result.stdout.strip() == f"chat: revision {hash_revision(load(old))}; nothing has to change"
    )


def test_a_paused_deployment_starts_no_step(cli: CliRunner, tmp_path: Path) -> None:
    old, new = manifest(tmp_path, "old"), manifest(tmp_path, "new", image="new:2", paused=True)
    result = run(cli, new, "--from", old)
    assert result.exit_code == 0
    assert result.stderr == "warning: spec.paused: no step starts until it is removed\n"


def test_a_roll_out_goes_on_from_its_status(cli: CliRunner, tmp_path: Path) -> None:
    target = hash_revision(load(manifest(tmp_path, "bare", image="new:2")))
    status = seen(target, ("prefill", 3, 3, 1), ("decode", 4, 4, 1))
    new = manifest(tmp_path, "new", image="new:2", status=status)
    assert steps(run(cli, new, "-o", "json"))[:3] == [(1, 2, 1, 3), (1, 2, 1, 2), (1, 2, 2, 2)]


def test_a_third_revision_starts_from_both_that_run(cli: CliRunner, tmp_path: Path) -> None:
    status = seen("halfway", ("prefill", 3, 2, 1), ("decode", 4, 3, 1))
    now = manifest(tmp_path, "now", status=status)
    found = steps(run(cli, manifest(tmp_path, "new", image="new:3"), "--from", now, "-o", "json"))
    assert found[0] == (0, 3, 0, 4)
    # What is halfway and not ready makes room first.
    assert found[1] == (0, 2, 0, 3)
    assert found[-1] == (2, 0, 3, 0)


def test_the_first_roll_out_starts_all_at_once(cli: CliRunner, tmp_path: Path) -> None:
    new = manifest(tmp_path, "new", status={})
    assert steps(run(cli, new, "-o", "json")) == [(0, 0, 0, 0), (2, 0, 3, 0)]


def test_what_runs_is_read_from_standard_input(cli: CliRunner, tmp_path: Path) -> None:
    old, new = manifest(tmp_path, "old"), manifest(tmp_path, "new", image="new:2")
    arguments = ("--from", "-", "-o", "json")
    result = run(cli, new, *arguments, input=old.read_text())
    assert steps(result)[0] == (0, 2, 0, 3)


def test_limits_come_from_the_new_manifest_or_the_command_line(
    cli: CliRunner, tmp_path: Path
) -> None:
    old = manifest(tmp_path, "old")
    new = manifest(tmp_path, "new", image="new:2", rollout={"maxSurge": 0, "maxUnavailable": 1})
    assert steps(run(cli, new, "--from", old, "-o", "json"))[1] == (0, 1, 0, 2)
    wider = run(cli, new, "--from", old, "-o", "json", "--max-surge", "3")
    assert json.loads(wider.stdout)["limits"] == {"maxSurge": 3, "maxUnavailable": 1}
    assert steps(wider)[1] == (2, 2, 3, 2)


def test_a_planned_deployment_is_planned(cli: CliRunner, tmp_path: Path) -> None:
    old = manifest(tmp_path, "old")
    workload = {"rate": 4, "promptTokens": {"mean": 200}, "outputTokens": {"mean": 50}}
    new = manifest(tmp_path, "new", workload=workload, image="new:2")
    document = yaml.safe_load(new.read_text())
    del document["spec"]["placement"]
    new.write_text(yaml.safe_dump(document))
    result = run(cli, new, "--from", old, "-o", "json")
    assert steps(result)[0][:4] == (0, 2, 0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--from: is required, because {new} has no status"),
        (["--from", "{other}"], "--from: is for other, but {new} is for chat"),
        (["--from", "{old}x"], "{old}x: No such file or directory"),
        (
            ["--from", "{old}", "--max-surge", "0"],
            "maxSurge and maxUnavailable must not both be 0",
        ),
    ],
)
def test_faults_are_one_line(
    cli: CliRunner, tmp_path: Path, arguments: list[str], message: str
) -> None:
    paths = {name: manifest(tmp_path, name) for name in ("old", "new", "other")}
    paths["other"].write_text(paths["other"].read_text().replace("name: chat", "name: other"))
    line = [each.format(**paths) for each in arguments]
    result = cli.invoke(app, ["rollout", "-f", str(paths["new"]), *line])
    assert result.exit_code == 2, result.output
    (fault,) = result.stderr.splitlines()
    assert fault.startswith(f"error: {message.format(**paths)}")


def test_a_plan_without_machines_is_refused(cli: CliRunner, tmp_path: Path) -> None:
    old = manifest(tmp_path, "old")
    workload = {"rate": 4, "promptTokens": {"mean": 200}, "outputTokens": {"mean": 50}}
    document = yaml.safe_load(old.read_text())
    document["spec"] |= {"workload": workload, "engine": {"type": "vLLM"}}
    del document["spec"]["placement"]
    new = tmp_path / "new.yaml"
    new.write_text(yaml.safe_dump(document))
    result = run(cli, new, "--from", old)
    assert result.exit_code == 2
    assert "--cluster: is required to plan it" in result.stderr


def test_cells_that_fit_a_node_are_replaced_as_pods(cli: CliRunner, tmp_path: Path) -> None:
    cells = [{"role": role, "replicas": 2, "perCell": 1} for role in ("prefill", "decode")]
    machines = tmp_path / "cluster.yaml"
    machines.write_text(yaml.safe_dump({"nodes": [{"gpu": "H100", "gpusPerNode": 8, "count": 1}]}))
    engines = [{"type": "vLLM", "connector": "Nixl", "image": image} for image in ("old", "new")]
    old, new = (
        manifest(tmp_path, engine["image"], cells, engine=engine, model="meta-llama/Llama-3.1-8B")
        for engine in engines
    )
    result = run(cli, new, "--from", old, "--cluster", machines, "-o", "json")
    assert steps(result) == [(0, 2), (1, 2), (1, 1), (2, 1), (2, 0)]
    assert set(json.loads(result.stdout)["steps"][0]["roles"]) == {"mixed"}
    # Eight GPUs hold four cells of two engines each, so three are no problem.
    assert result.stderr == ""
    wide = [{**cell, "parallelism": {"tensor": 2}} for cell in cells]
    old, new = (
        manifest(tmp_path, engine["image"], wide, engine=engine, model="meta-llama/Llama-3.1-8B")
        for engine in engines
    )
    crowded = run(cli, new, "--from", old, "--cluster", machines)
    assert crowded.exit_code == 0
    assert crowded.stderr == (
        "warning: a step needs 12 x H100-SXM-80GB (3 x 4), and the nodes have 1 x 8: its new "
        "instances will wait; free GPUs, or set maxSurge 0 and maxUnavailable 1 under "
        "spec.rollout\n"
    )
    limits = "--max-surge", "0", "--max-unavailable", "1"
    assert run(cli, new, "--from", old, "--cluster", machines, *limits).stderr == ""


@pytest.mark.parametrize(
    ("of_nodes", "of_pool", "field"),
    [
        ("H999", None, "nodes[0].gpu: unknown GPU 'H999'"),
        ("H100-SXM-80GB", "H999", "spec.placement.manual: gpu of role prefill: unknown GPU 'H999'"),
    ],
)
def test_an_unknown_gpu_is_one_line(
    of_nodes: str, of_pool: str | None, field: str, cli: CliRunner, tmp_path: Path
) -> None:
    machines = tmp_path / "cluster.yaml"
    nodes = [{"gpu": of_nodes, "count": 1, "gpusPerNode": 8}]
    machines.write_text(yaml.safe_dump({"nodes": nodes}))
    pools = [{**each, "gpu": of_pool} if of_pool else each for each in PAIRS]
    engine = {"type": "vLLM"}
    old = manifest(tmp_path, "old", pools, engine={**engine, "image": "old:1"})
    new = manifest(tmp_path, "new", pools, engine={**engine, "image": "new:1"})
    result = run(cli, new, "--from", old, "--cluster", machines)
    assert result.exit_code == 2, result.stderr
    assert field in result.stderr
    assert "internal error" not in result.stderr
    assert result.stdout == ""
