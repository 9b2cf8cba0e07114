import os

from cleave.local.node import Gpu, inspect, parse_gpus


def test_gpus_are_read_from_nvidia_smis_lines() -> None:
    csv = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA GB10, [N/A]\n"
    assert parse_gpus(csv) == (
        Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20),
        Gpu(1, "NVIDIA GB10", 0),
    )


def test_this_machine_has_the_cores_of_this_process_and_some_memory() -> None:
    node = inspect()
    assert node.cores == os.sched_getaffinity(0)
    assert 0 < node.memory_bytes < 2**50
