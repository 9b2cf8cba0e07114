"""The check of worker-cuda without a GPU: what it counts as a fault."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check_cuda_image.py")
assert _spec is not None
assert _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
sys.modules["check"] = check
_spec.loader.exec_module(check)

FLASH, FLASHINFER = "FlashAttentionBackend", "FlashInferBackend"


def faults(attention=FLASH, sampler=False, deep_gemm=False, has_nvcc=False, error=""):
    choices = check.KernelChoices({"bf16": attention}, sampler, deep_gemm, has_nvcc, error)
    return list(check.list_kernel_faults("sm_90", choices))


def test_kernels_of_the_wheels_need_no_compiler() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("choices", "fault"),
    [
        ({"attention": FLASHINFER}, "attention for bf16 is FlashInferBackend, which needs nvcc"),
        ({"attention": "FlashInferMLABackend"}, "FlashInferMLABackend, which needs nvcc"),
        ({"deep_gemm": True}, "DeepGEMM is used for FP8 blocks and needs nvcc"),
        ({"sampler": True, "error": "no nvcc"}, "sampler is not compiled: no nvcc"),
        ({"attention": "No valid attention backend found"}, "no attention for bf16: No valid"),
    ],
)
def test_what_would_be_compiled_without_nvcc_is_a_fault(choices, fault) -> None:
    (line,) = faults(**choices)
    assert fault in line


@pytest.mark.parametrize(
    ("choices", "fault"),
    [
        ({"FP8 blocks": "DeepGemmFp8BlockScaledMMKernel"}, "for FP8 blocks is DeepGemmFp8BlockSc"),
        ({"experts": "FlashInferExperts"}, "for experts is FlashInferExperts, which needs nvcc"),
        ({"experts": "TrtLlmBf16Experts"}, "for experts is TrtLlmBf16Experts, which needs nvcc"),
        ({"NVFP4": "error: no backend supports it"}, "no kernel for NVFP4: error: no backend"),
    ],
)
def test_products_and_experts_that_need_nvcc_are_faults(choices, fault) -> None:
    of_nvcc = check.KernelChoices({}, False, False, False, products=choices)
    (line,) = check.list_kernel_faults("sm_90", of_nvcc)
    assert fault in line


def test_humming_needs_the_run_time_compiler_only() -> None:
    products = {"NVFP4": "HummingNvFp4LinearKernel", "bf16 experts": "TritonExperts"}
    choices = check.KernelChoices({}, False, False, False, products=products)
    assert list(check.list_kernel_faults("sm_90", choices)) == []
    (line,) = check.list_kernel_faults("sm_90", replace(choices, nvrtc_error="no libnvrtc"))
    assert line == "sm_90: Humming's kernels are not compiled: no libnvrtc"


def test_nvcc_that_does_not_compile_is_a_fault_and_one_that_does_is_not() -> None:
    choices = {"attention": FLASHINFER, "sampler": True, "deep_gemm": True, "has_nvcc": True}
    assert faults(**choices) == []
    assert len(faults(**choices, error="headers do not match")) == 1


def test_names_of_libraries_are_whole_texts() -> None:
    content = b"\0libibverbs.so.1\0cannot open libmlx4.so.1\0libmlx5.so\0libc.so.6\n\0"
    assert check.find_library_names(content) == {"libibverbs.so.1", "libmlx5.so"}


def test_a_library_may_have_any_of_its_names_and_the_drivers_are_not_looked_for() -> None:
    names = ["libibverbs.so", "libibverbs.so.1", "libmlx5.so.1", "libcuda.so.1", "libgdrapi.so"]
    assert list(check.list_missing(names, {"libibverbs.so.1"}.__contains__)) == ["libmlx5.so.1"]
    assert list(check.list_missing(names, lambda name: False)) == [
        "libibverbs.so.1",
        "libmlx5.so.1",
    ]


def test_the_stub_has_the_drivers_functions_only() -> None:
    printed = "\n".join(
        [
            "vllm/_C.so:",
            "                 U cuMemCreate",
            "                 U cuInit@libcuda.so.1",
            "                 U cudaMalloc",
            "                 U cublasCreate_v2",
            "                 U cuFileRead",
            "0000000000001000 T cuMine",
        ]
    )
    assert check.find_driver_symbols(printed) == {"cuMemCreate", "cuInit"}


def test_the_image_is_checked_after_everything_is_in_it() -> None:
    last_stage = (ROOT / "images" / "Dockerfile").read_text().rpartition(" AS worker-cuda\n")[2]
    copied, checked = last_stage.index("COPY --from"), last_stage.index("check_cuda_image.py")
    assert copied < checked < last_stage.index("\nUSER ")
