import os
from pathlib import Path

from cleave.local.kubelet.node import (
    GpuDevice,
    inspect_node,
    parse_gpus,
    read_cgroup_available_bytes,
)


def test_gpus_are_read_from_nvidia_smis_lines() -> None:
    csv = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA GB10, [N/A]\n"
    assert parse_gpus(csv) == (
        GpuDevice(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20),
        GpuDevice(1, "NVIDIA GB10", 0),
    )


def test_this_machine_has_the_cores_of_this_process_and_some_memory() -> None:
    node = inspect_node()
    assert node.cores == os.sched_getaffinity(0)
    assert 0 < node.memory_bytes < 2**50


def test_a_memory_limit_counts_what_is_used_but_not_caches_that_give_way(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\nactive_file 150\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert read_cgroup_available_bytes(tmp_path) == 550
    (tmp_path / "memory.max").write_text("max\n")
    assert (
        read_cgroup_available_bytes(tmp_path)
        == read_cgroup_available_bytes(tmp_path / "absent")
        == 2**63
    )
