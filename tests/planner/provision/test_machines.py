from dataclasses import replace
from pathlib import Path

import pytest

from cleave.api.cluster import Cluster, NodeGroup
from cleave.api.deployment import Slo
from cleave.api.manifest import ManifestError
from cleave.api.planning import GpuChoice
from cleave.perf.estimator import build_estimator
from cleave.perf.hardware import link
from cleave.perf.model import model_shape
from cleave.perf.profile.profile import write_profile
from cleave.planner.problem import Problem, Supply
from cleave.planner.provision import machines
from cleave.planner.provision.search import (
    ProvisioningError,
    ProvisioningObjective,
    ProvisioningRequest,
    provision,
)
from cleave.traffic import published

from tests.support import splitwise_runs

CLUSTER = Cluster(nodes=[NodeGroup(gpu="A100-SXM-80GB"), NodeGroup(gpu="H100-SXM-80GB")])


def problem(
    name: str = "llama-2-70b", cluster: Cluster = CLUSTER, folder: Path = Path()
) -> Problem:
    shape = model_shape.load_shape(name)
    estimator = build_estimator(shape, cluster, folder=folder)
    supplies = tuple(
        Supply(gpu, 1, 8, 8, link.build_node_link(machine.gpu), machine.network)
        for gpu, machine in estimator.machines.items()
    )
    demand = (
        published.get_workload("azure-conversation")
        .build_demand()
        .with_max_model_len(shape.max_model_len)
    )
    return Problem(demand, Slo(ttft_ms=1000, tpot_ms=100), supplies, shape, estimator)


def test_a_machine_is_a_node_with_one_instance_on_all_its_gpus() -> None:
    a100, h100 = machines.list_nodes(problem())
    assert (a100.machine.name, h100.machine.name) == ("A100-SXM-80GB", "H100-SXM-80GB")
    assert a100.sizes == h100.sizes == (8, 1)
    assert h100.machine.estimate.power_watts == 8 * 700
    assert (a100.machine.power_watts, h100.machine.power_watts) == (6_500, 10_200)


def test_a_node_whose_power_is_not_known_takes_more_than_its_gpus() -> None:
    cluster = Cluster(nodes=[NodeGroup(gpu="A100-PCIe-80GB")])
    (node,) = machines.list_nodes(problem("llama-2-70b", cluster))
    assert node.machine.power_watts == pytest.approx(1.8 * 8 * 300)


def test_groups_of_the_same_gpu_are_one_kind() -> None:
    once = problem()
    twice = replace(once, supplies=(*once.supplies, *once.supplies))
    assert len(machines.list_nodes(twice)) == 2


def test_a_model_that_cannot_use_all_gpus_by_tensors_uses_stages() -> None:
    nodes = machines.list_nodes(problem("qwen2.5-7b"))
    tensor, pipeline = nodes[0].sizes
    assert (tensor * pipeline, tensor) == (8, 4)


def test_a_model_that_fits_no_node_is_reported_with_the_reason() -> None:
    small = Cluster(nodes=[NodeGroup(gpu="A10G", gpus_per_node=1)])
    machine_problem = problem("llama-2-70b", small)
    machine_problem = replace(
        machine_problem, supplies=(replace(machine_problem.supplies[0], gpus_per_node=1),)
    )
    with pytest.raises(ProvisioningError, match="the model fits no type of node \\(1 x A10G: "):
        machines.list_nodes(machine_problem)


def test_every_prompt_kind_meets_every_token_kind_and_stands_alone() -> None:
    machine_problem = problem()
    found = machines.list_nodes(machine_problem)
    names = [pair.name for pair in machines.build_pairs(machine_problem.shape, found, found)]
    a100, h100 = "A100-SXM-80GB", "H100-SXM-80GB"
    assert names == [
        *(f"{a100} + {a100}", f"{a100} + {h100}", f"{h100} + {a100}", f"{h100} + {h100}"),
        *(f"{a100} mixed", f"{h100} mixed"),
    ]


def test_the_slowest_machine_is_the_reference() -> None:
    machine_problem = problem()
    assert (
        machines.find_slowest(machines.list_nodes(machine_problem), machine_problem.demand).name
        == "A100-SXM-80GB"
    )


def test_capped_machines_need_less_power_and_prompt_slower_but_decode_the_same() -> None:
    machine_problem = problem()
    full = machines.list_nodes(machine_problem)
    capped = machines.apply_power_cap(machine_problem, full, CLUSTER, Path(), 0.5)
    for one, other in zip(full, capped, strict=True):
        timing, slow = one.machine.estimate.timing, other.machine.estimate.timing
        assert other.machine.name == f"{one.machine.name} at 50%"
        assert other.machine.estimate.power_watts == one.machine.estimate.power_watts / 2
        assert other.machine.host_watts == one.machine.host_watts
        assert slow.predict_prefill_ms([1000]) == pytest.approx(
            1.3 * timing.predict_prefill_ms([1000]), rel=0.01
        )
        assert slow.predict_decode_ms(8, 8000) == pytest.approx(timing.predict_decode_ms(8, 8000))
    with pytest.raises(ManifestError, match="is below half"):
        machines.apply_power_cap(machine_problem, full, CLUSTER, Path(), 0.3)


def test_a_power_cap_leaves_the_rest_of_a_machine_its_power() -> None:
    whole = problem()
    choices = [GpuChoice(type="H100-SXM-80GB", power_cap_watts=350)]
    limited = replace(whole, estimator=build_estimator(whole.shape, CLUSTER, choices))
    uncapped, capped = (machines.list_nodes(each)[-1].machine for each in (whole, limited))
    assert capped.host_watts == uncapped.host_watts
    assert uncapped.power_watts - capped.power_watts == 8 * 350


def test_capped_token_machines_win_among_split_ones_and_chunks_win_over_both(
    tmp_path: Path,
) -> None:
    """Section VI-B, conversation, with the paper's iterations: Splitwise-HHcap does better than HH.
    The paper's baseline, whose prompts are whole, does worse than both; mixed machines that compute
    them in chunks do not."""
    names = [each.gpu for each in CLUSTER.nodes]
    for name in names:
        measured = splitwise_runs.find_profile("llama-2-70b", name, 8)
        assert measured is not None
        write_profile(measured, tmp_path / f"{name}.json")
    cluster = CLUSTER.model_copy(update={"profiles": [f"{name}.json" for name in names]})
    machine_problem = problem(cluster=cluster, folder=tmp_path)
    found = machines.list_nodes(machine_problem)
    capped = machines.apply_power_cap(machine_problem, found[1:], cluster, tmp_path, 0.5)
    pairs = machines.build_pairs(machine_problem.shape, found[1:], (found[1], *capped))
    reference = found[0].machine.estimate.timing
    question = ProvisioningRequest(
        machine_problem.demand,
        pairs,
        reference,
        ProvisioningObjective.THROUGHPUT,
        max_power_watts=10 * 10_200.0,
    )
    rates = {design.name: design.rate for design in provision(question)}
    h100 = "H100-SXM-80GB"
    assert list(rates) == [f"{h100} mixed", f"{h100} + {h100} at 50%", f"{h100} + {h100}"]
    assert rates[f"{h100} + {h100} at 50%"] > 1.05 * rates[f"{h100} + {h100}"]
