"""The GPU catalogue: names, caps, and figures that a mistake would break."""

import math

import pytest

from cleave.perf.hardware import gpu
from cleave.perf.hardware.gpu import CATALOGUE, Gpu, PowerCapError, UnknownGpuError, find_gpu

OWN = Gpu("H100-SXM-80GB", 79.0, 3000, 900, None, None, 32, 500, 1.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100-SXM-80GB", "A100-SXM-80GB"),
        ("a100_sxm_80gb", "A100-SXM-80GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA-A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM-80GB"),
        ("NVIDIA-H200", "H200-SXM-141GB"),
        ("Tesla-V100-SXM2-16GB", "V100-SXM-16GB"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
        ("l40s", "L40S"),
        ("NVIDIA-H100-NVL", "H100-NVL-94GB"),
        ("NVIDIA-GB200", "GB200-NVL"),
        ("RTX-PRO-6000", "RTX-PRO-6000-Server"),
    ],
)
def test_names_and_node_labels_are_found_in_any_case(name: str, expected: str) -> None:
    assert find_gpu(name).name == expected


def test_no_name_or_label_stands_for_two_gpus() -> None:
    words = [gpu._normalize_name(word) for each in CATALOGUE for word in {each.name, *each.labels}]
    owners = {
        word: [
            each.name
            for each in CATALOGUE
            if word in map(gpu._normalize_name, (each.name, *each.labels))
        ]
        for word in words
    }
    assert {word: names for word, names in owners.items() if len(names) > 1} == {}


def test_an_own_description_comes_before_the_catalogue() -> None:
    assert find_gpu("h100", [OWN]).memory_gbps == 3350
    assert find_gpu("H100-SXM-80GB", [OWN]).memory_gbps == 3000


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "did you mean A100-"),
        ("H100-SXM-80G", "did you mean H100-SXM-80GB"),
        ("GTX-1080", "known: A100-SXM-40GB, "),
        ("", "known: "),
    ],
)
def test_an_unknown_gpu_is_rejected_with_suggestions(name: str, hint: str) -> None:
    with pytest.raises(UnknownGpuError, match=f"unknown GPU '{name}'; {hint}") as raised:
        find_gpu(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("each", CATALOGUE, ids=lambda each: each.name)
def test_every_figure_is_within_what_gpus_have(each: Gpu) -> None:
    assert 14 < each.memory_gib < 300
    # A dense pass over the memory takes 15 to 100 ms on every GPU of the last years.
    assert 15 < each.memory_bytes / each.memory_gbps / 1e6 < 100 or each.name == "GB10"
    # FLOPs per byte at which a matrix product stops being bound by memory.
    assert 70 < each.dense_tflops * 1e3 / each.memory_gbps < 460 or each.name == "H20-SXM-96GB"
    assert each.get_tflops(is_8_bit=True) >= each.get_tflops(is_8_bit=False)
    assert each.nvlink_gbps is None or each.nvlink_gbps > each.pcie_gbps
    assert 0.3 < each.price_per_hour < 20
    assert 50 < each.power_watts <= 1400


def test_a_cap_slows_prompts_alone() -> None:
    full = find_gpu("H100")
    half = full.with_power_cap(350)
    assert half.power_watts == 350
    assert full.dense_tflops / half.dense_tflops == pytest.approx(1.30)
    assert half.fp8_tflops is not None
    assert full.get_tflops(is_8_bit=True) / half.fp8_tflops == pytest.approx(1.30)
    assert half.memory_gbps == full.memory_gbps
    assert half.name == full.name


def test_a_tighter_cap_is_never_faster() -> None:
    speeds = [
        find_gpu("A100-80GB").with_power_cap(watts).dense_tflops for watts in range(200, 401, 10)
    ]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]


def test_a_cap_above_the_rated_power_changes_nothing() -> None:
    full = find_gpu("H100")
    assert full.with_power_cap(700) is full
    assert full.with_power_cap(9000) is full


@pytest.mark.parametrize("watts", [349, 0, -1, math.nan])
def test_a_cap_whose_effect_is_not_known_is_refused(watts: float) -> None:
    with pytest.raises(PowerCapError, match="below half of the 700 W of H100-SXM-80GB"):
        find_gpu("H100").with_power_cap(watts)
