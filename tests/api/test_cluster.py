"""What a user reads when a cluster file is right, and when it is not."""

from pathlib import Path

import pytest

from cleave.api.cluster import NetworkKind
from cleave.api.manifest import ManifestError, load_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = "InfiniBand, Ethernet"
OWN = "{name: X, memoryGib: 80, memoryGbps: 2000, denseTflops: 300}"


def faults(source: str | Path) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as raised:
        load_cluster(source)
    return raised.value.faults


def test_distserves_test_bed_is_four_lines() -> None:
    path = EXAMPLES / "cluster.yaml"
    cluster = load_cluster(path)
    assert len(path.read_text().splitlines()) <= 4
    assert cluster.total_gpus == 32
    assert cluster.network.bandwidth_gbps == 25


def test_nodes_may_have_different_gpus() -> None:
    cluster = load_cluster(EXAMPLES / "cluster-mixed.yaml")
    assert [group.count * group.gpus_per_node for group in cluster.nodes] == [16, 32]
    assert cluster.network.kind is NetworkKind.INFINIBAND


def test_profiles_are_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{gpu: H100}]\nprofiles: [a.json, /b/c.json, ../d.json]\n")
    assert load_cluster(path).profiles == [
        str(tmp_path / "a.json"),
        "/b/c.json",
        str(tmp_path / "../d.json"),
    ]


def test_profiles_of_a_text_are_found_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = load_cluster("nodes: [{gpu: H100}]\nprofiles: [a.json]")
    assert cluster.profiles == [str(tmp_path / "a.json")]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("{}", ("nodes: required",)),
        ("nodes: []", ("nodes: must have at least 1 entry",)),
        ("nodes: [{}]", ("nodes[0].gpu: required",)),
        ("nodes: [{gpu: H100, count: 0}]", ("nodes[0].count: must be >= 1 (got 0)",)),
        ("nodes: [{gpu: H100, gpusPerNode: 0}]", ("nodes[0].gpusPerNode: must be >= 1 (got 0)",)),
        (
            "nodes: [{gpu: H100, gpusPerNode: 1024}]",
            ("nodes[0].gpusPerNode: must be <= 128 (got 1024)",),
        ),
        (
            "nodes: [{gpu: H100}]\nnetwork: {bandwidthGbps: 1e2}",
            (
                (
                    "network.bandwidthGbps: must be a number (got '1e2'); "
                    "YAML reads this as text: write 100"
                ),
            ),
        ),
        (
            "nodes: [{gpu: H100}]\nnetwork: {bandwidthGbps: 1e300, latencyUs: 1e999}",
            (
                (
                    "network.bandwidthGbps: must be a number (got '1e300'); "
                    "YAML reads this as text: write 1.0e+300"
                ),
                "network.latencyUs: must be a number (got '1e999')",
            ),
        ),
        ("nodes: [{gpu: H100, count: 1.5}]", ("nodes[0].count: must be a whole number (got 1.5)",)),
        ("nodes: [{gpu: ''}]", ("nodes[0].gpu: must not be empty",)),
        ("nodes: [{gpu: 100}]", ("nodes[0].gpu: must be text (got 100)",)),
        ("nodes: {gpu: H100}", ("nodes: must be a list (got {'gpu': 'H100'})",)),
        ("nodes: [{gpu: H100, gpus: 8}]", ("nodes[0].gpus: unknown field; did you mean gpu?",)),
        ("node: [{gpu: H100}]", ("nodes: required", "node: unknown field; did you mean nodes?")),
        (
            "nodes: [{gpu: H100}]\nnetwork: {bandwidthGbps: .nan}",
            ("network.bandwidthGbps: must be a number (got nan)",),
        ),
        (
            "nodes: [{gpu: H100}]\nnetwork: {bandwidthGbps: 0, latencyUs: -1}",
            (
                "network.bandwidthGbps: must be > 0 (got 0)",
                "network.latencyUs: must be >= 0 (got -1)",
            ),
        ),
        (
            "nodes: [{gpu: H100}]\nnetwork: {kind: ethernet}",
            (f"network.kind: must be one of {KINDS}; did you mean Ethernet? (got 'ethernet')",),
        ),
        (f"nodes: [{{gpu: X}}]\ngpus: [{OWN}, {OWN}]", ("gpus: must not name a GPU twice",)),
        (
            "nodes: [{gpu: X}]\ngpus: [{name: X, memoryGib: 80, memoryGbps: 2000}]",
            ("gpus[0].denseTflops: required",),
        ),
        (
            "nodes: [{gpu: H100}]\n---\nnodes: [{gpu: H100}]",
            ("manifest holds 2 YAML documents; one cluster is expected",),
        ),
        ("", ("manifest is empty; state nodes: [{count: 1, gpu: ...}]",)),
        ("just words", ("must be an object with nodes (got 'just words')",)),
        ("nodes: [{gpu: H100}]\nnodes: []", ("manifest:2: key 'nodes' is written twice",)),
    ],
)
def test_every_fault_is_one_line_with_its_path(text: str, messages: tuple[str, ...]) -> None:
    assert faults(text) == messages


def test_a_cycle_is_a_fault_and_no_crash() -> None:
    (fault,) = faults("nodes: &nodes [*nodes]")
    assert fault == "an anchor (&) holds an alias (*) of itself; write the values out"


def test_a_deployment_in_place_of_a_cluster_is_recognized() -> None:
    assert "kind: unknown field" in "\n".join(faults(EXAMPLES / "smallest.yaml"))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert faults(path) == (f"{path}: No such file or directory",)
