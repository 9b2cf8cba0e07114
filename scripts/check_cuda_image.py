#!/usr/bin/env python3
"""Checks the environment of the image worker-cuda on a machine without a GPU.

    python scripts/check_cuda_image.py        # exit code 1 and a line for each fault

Run by images/Dockerfile in the finished image, and by `make check-cuda` in an environment of its
own. For Hopper (sm_90) and Blackwell (sm_100) it asks vLLM's own selection which kernels an engine
would take with the environment that the agent gives it: attention, sampler, products of quantized
weights, experts. Kernels of FlashInfer and DeepGEMM are compiled at the engine's start, so choosing
them without a working nvcc is a fault, which on a GPU ends the engine in its warm-up; FlashInfer's
sampler is compiled to find out. Humming's are compiled with NVRTC, a library of CUDA's wheels: one
is, where vLLM takes them. Then a Triton kernel is compiled for both, and every library that NCCL
and UCX open by name is opened.

What is hard: vLLM's extensions are linked with the driver's libcuda, which machines without a GPU
do not have. A stub takes its place, whose functions fail as those of NVIDIA's own stub do.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

CAPABILITIES = (9, 10)
"""Major compute capabilities: Hopper, Blackwell."""
ATTENTION: dict[str, dict[str, Any]] = {
    "bf16": {"head_size": 128, "kv_cache_dtype": "auto"},
    "FP8 KV": {"head_size": 128, "kv_cache_dtype": "fp8"},
    "gpt-oss": {
        "head_size": 64, "kv_cache_dtype": "auto", "has_sink": True, "has_sliding_window": True,
    },
    "MLA": {"head_size": 576, "kv_cache_dtype": "auto", "use_mla": True},
}  # fmt: skip
"""Kinds of attention, as vLLM's selector describes them."""
COMPILED_WITH_NVCC = ("FlashInfer", "TrtLlm", "DeepGemm", "BatchedDeepGemm", "TritonOrDeepGemm")
"""How names of vLLM's classes begin whose kernels nvcc compiles at the engine's start."""
COMPILED_WITH_NVRTC = "Humming"
FROM_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that NVIDIA's container runtime mounts from the node."""
OPTIONAL = ("libgdrapi", "libnccl-gin", "libnccl-net")
"""GDRCopy and plug-ins, without which NCCL takes its own ways."""

_CHILD_SECONDS = 600
_STUB_ERROR = 34
"""CUDA_ERROR_STUB_LIBRARY."""


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """What an engine would compute with on one GPU."""

    attention: dict[str, str]
    """Kind of attention -> vLLM's class, or the error of the selection."""
    flashinfer_sampler: bool
    deep_gemm: bool
    has_nvcc: bool
    compile_error: str = ""
    """Why FlashInfer's sampler cannot be compiled; empty: it can, or is not used."""
    products: dict[str, str] = field(default_factory=dict)
    """Kind of weights, of experts -> vLLM's class, or the error of the selection."""
    nvrtc_error: str = ""
    """Why Humming's kernels cannot be compiled; empty: they can, or are not used."""


def list_kernel_faults(name: str, choices: KernelChoices) -> Iterator[str]:
    """Faults of the choices for the GPU architecture `name`."""
    if choices.compile_error:
        yield f"{name}: FlashInfer's sampler is not compiled: {choices.compile_error}"
    for kind, chosen in choices.attention.items():
        if not chosen.endswith("Backend"):
            yield f"{name}: no attention for {kind}: {chosen}"
        elif "FlashInfer" in chosen and not choices.has_nvcc:
            yield f"{name}: attention for {kind} is {chosen}, which needs nvcc"
    if choices.deep_gemm and not choices.has_nvcc:
        yield f"{name}: DeepGEMM is used for FP8 blocks and needs nvcc"
    for kind, chosen in choices.products.items():
        if not chosen.isidentifier():
            yield f"{name}: no kernel for {kind}: {chosen}"
        elif chosen.startswith(COMPILED_WITH_NVCC) and not choices.has_nvcc:
            yield f"{name}: the kernel for {kind} is {chosen}, which needs nvcc"
    if choices.nvrtc_error:
        yield f"{name}: Humming's kernels are not compiled: {choices.nvrtc_error}"


def find_library_names(content: bytes) -> set[str]:
    """File names of shared libraries among the zero-terminated texts of a binary."""
    texts = re.findall(rb"(?<=\0)lib[A-Za-z0-9_-]+\.so(?:\.\d+)?(?=\0)", content)
    return {text.decode() for text in texts}


def list_missing(names: Iterable[str], can_open: Callable[[str], bool]) -> Iterator[str]:
    """Libraries that cannot be opened under any of their names, `libx.so` or `libx.so.1`."""
    names_by_stem: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        names_by_stem.setdefault(name.partition(".so")[0], []).append(name)
    from_driver = {name.partition(".so")[0] for name in FROM_DRIVER}
    for stem, alternatives in names_by_stem.items():
        if stem in from_driver or stem in OPTIONAL:
            continue
        if not any(map(can_open, alternatives)):
            yield alternatives[-1]


def find_driver_symbols(nm_output: str) -> set[str]:
    """Functions of the CUDA driver API among the undefined symbols that `nm` prints."""
    return set(re.findall(r" U (cu(?!File)[A-Z]\w*)(?:@\S+)?$", nm_output, re.MULTILINE))


def main() -> int:
    """Run all checks, those of vLLM in processes of their own; return the exit code."""
    parser = argparse.ArgumentParser(description="Checks the environment of worker-cuda.")
    parser.add_argument("--child", metavar="CAPABILITY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_check_in_child(options.child)))  # noqa: T201
        return 0
    faults = []
    with TemporaryDirectory() as folder:
        _build_stub(Path(folder))
        env = _build_engine_env(Path(folder))
        for check in ("libraries", *map(str, CAPABILITIES)):
            report = _run_child(check, env)
            faults += report["faults"]
            print(f"{report['name']}: {report['found']}")  # noqa: T201
    for fault in faults:
        print(f"FAULT {fault}")  # noqa: T201
    print(f"{len(faults)} faults" if faults else "ok")  # noqa: T201
    return 1 if faults else 0


def _build_engine_env(folder: Path) -> dict[str, str]:
    """The environment of an engine that the agent starts on a GPU, with the stub of its driver."""
    from cleave.rpc.v1 import agent_pb2
    from cleave_worker.agent.config import AgentConfig
    from cleave_worker.agent.launch import Boot, build_engine_launch

    role = agent_pb2.ROLE_MIXED
    config = AgentConfig("check", "check", "", role, "org/model", "model", "vllm", "127.0.0.1")
    boot = Boot("check", engine_port=1, kv_port=2, load_page=folder / "load", gpu=True)
    env = dict(build_engine_launch(config, boot, os.environ).env)
    paths = filter(None, (str(folder), env.get("LD_LIBRARY_PATH")))
    return env | {
        "LD_LIBRARY_PATH": ":".join(paths),
        "LIBRARY_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def _build_stub(folder: Path) -> None:
    """Make a libcuda.so.1 with every function that installed extensions are linked with."""
    packages = Path(sysconfig.get_paths()["purelib"])
    patterns = ("vllm/**/*.so", "torch/lib/*.so*", "nixl_cu13.libs/ucx/*.so*", "humming/**/*.so")
    files = [file for pattern in patterns for file in packages.glob(pattern)]
    command = ["nm", "--dynamic", "--undefined-only", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    symbols = sorted(find_driver_symbols(done.stdout))
    source = folder / "stub.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return {_STUB_ERROR}; }}\n" for name in symbols)
    )
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # for linkers: nvcc's modules name it so
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["gcc", *options, str(source)], timeout=300, check=True)


def _run_child(check: str, env: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", check]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return {"name": check, "found": "failed", "faults": [f"{check}: {last}"]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _check_in_child(check: str) -> dict[str, Any]:
    if check == "libraries":
        faults = [*_list_library_faults(), *_list_compiler_faults()]
        return {"name": check, "found": "NCCL, UCX, Triton, C compiler", "faults": faults}
    name = f"sm_{check}0"
    choices = _find_choices(int(check))
    faults = list(list_kernel_faults(name, choices))
    sampler = "FlashInfer" if choices.flashinfer_sampler else "torch"
    found = (
        f"{choices.attention}, {choices.products}, sampler {sampler}, DeepGEMM {choices.deep_gemm}"
    )
    return {"name": name, "found": found, "faults": faults}


def _list_library_faults() -> Iterator[str]:
    import torch  # noqa: F401 - as in an engine, it loads CUDA's libraries before NIXL does

    packages = Path(sysconfig.get_paths()["purelib"])
    nccl = (packages / "nvidia/nccl/lib/libnccl.so.2").read_bytes()
    for name in list_missing(find_library_names(nccl), lambda name: not _explain_failure(name)):
        yield f"libraries: NCCL opens {name}: {_explain_failure(name)}"
    for library in (packages / "nixl_cu13.libs").glob("libucs-*.so*"):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # which opens the modules
    modules = sorted((packages / "nixl_cu13.libs/ucx").glob("libuc[mt]_*.so*"))
    if not modules:
        yield "libraries: NIXL has no modules of UCX"
    for module in modules:
        error = _explain_failure(str(module))
        if error and not error.startswith(FROM_DRIVER):
            yield f"libraries: UCX opens {module.name}: {error}"


def _explain_failure(name: str) -> str:
    """Why a library cannot be opened; empty: it can."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def _list_compiler_faults() -> Iterator[str]:
    """Compile what Triton and Inductor compile: a kernel for each GPU, and a module of Python."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit  # type: ignore[misc, unused-ignore]
    def increment(data, size, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(data + at, tl.load(data + at, mask=at < size) + 1, mask=at < size)

    signature = {"data": "*fp32", "size": "i32", "block": "constexpr"}
    source = ASTSource(increment, signature, {"block": 128})
    for capability in CAPABILITIES:
        try:
            triton.compile(source, target=GPUTarget("cuda", 10 * capability, 32))
        except Exception as error:  # noqa: BLE001 - any error is the fault
            yield f"sm_{capability}0: Triton does not compile: {error}"
    include = sysconfig.get_paths()["include"]
    command = ["gcc", f"-I{include}", "-xc", "-fsyntax-only", "-"]
    text = "#include <Python.h>\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"compiler: no Python.h for gcc: {done.stderr.strip().splitlines()[0]}"


def _find_choices(major: int) -> KernelChoices:
    """Let vLLM choose for a GPU of this compute capability, which need not be here."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{major}.0a"
    import torch
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class AbsentGpu(CudaPlatform):  # type: ignore[misc, valid-type]
        """As the platform that vLLM finds with a GPU, without asking the driver."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
            return DeviceCapability(major, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
            return f"sm_{major}0"

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: ARG003
            return 132

    platforms._current_platform = AbsentGpu()
    torch.accelerator.current_device_index = lambda: 0
    make_empty = torch.empty
    # Backends allocate workspaces on the GPU when they are imported.
    torch.empty = lambda *size, **options: make_empty(*size, **{**options, "device": "meta"})
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.utils.deep_gemm import is_deep_gemm_supported
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    from cleave_worker.agent.launch import has_nvcc

    attention = {}
    for kind, fields in ATTENTION.items():
        config = AttentionSelectorConfig(
            dtype=torch.bfloat16, block_size=None, use_kv_connector=True, **fields
        )
        with set_current_vllm_config(VllmConfig()):
            try:
                chosen = AbsentGpu.get_attn_backend_cls(None, config, 32)
            except ValueError as error:
                chosen = str(error)
        attention[kind] = chosen.rpartition(".")[2]
    sampler = flashinfer_sampler_supported()
    products = _choose_products()
    has_humming = any(each.startswith(COMPILED_WITH_NVRTC) for each in products.values())
    return KernelChoices(
        attention,
        flashinfer_sampler=sampler,
        deep_gemm=is_deep_gemm_supported(),
        has_nvcc=has_nvcc(os.environ),
        compile_error=_compile_sampler() if sampler else "",
        products=products,
        nvrtc_error=_compile_with_nvrtc(major) if has_humming else "",
    )


def _choose_products() -> dict[str, str]:
    """Let vLLM choose kernels for products of weights, and for experts, by kind of weights."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, nvfp4, unquantized
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    bf16, shape = torch.bfloat16, (4096, 4096)
    block, tensor = keys.kFp8Static128BlockSym, keys.kFp8StaticTensorSym
    experts, gpt_oss = (
        FusedMoEConfig(
            num_experts=64,
            experts_per_token=8,
            hidden_dim=shape[0],
            intermediate_size=2048,
            num_local_experts=64,
            num_logical_experts=64,
            activation=activation,
            device="cuda",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=bf16,
            has_bias=has_bias,
        )
        for activation, has_bias in ((MoEActivation.SILU, False), (MoEActivation.SWIGLUOAI, True))
    )

    def choose_fp8(activations: object, weights: object) -> object:
        return linear.init_fp8_linear_kernel(activations, weights, bf16, bf16, shape)

    selections: dict[str, Callable[[], object]] = {
        "FP8": lambda: choose_fp8(tensor, tensor),
        "FP8 blocks": lambda: choose_fp8(keys.kFp8Dynamic128Sym, block),
        "NVFP4": linear.init_nvfp4_linear_kernel,
        "MXFP4": linear.init_mxfp4_linear_kernel,
        "bf16 experts": lambda: unquantized.select_unquantized_moe_backend(experts),
        "FP8 experts": lambda: fp8.select_fp8_moe_backend(experts, tensor, tensor),
        "FP8 block experts": lambda: fp8.select_fp8_moe_backend(
            experts, block, keys.kFp8Dynamic128Sym
        ),
        "NVFP4 experts": lambda: nvfp4.select_nvfp4_moe_backend(
            experts, keys.kNvfp4Static, keys.kNvfp4Dynamic
        ),
        "MXFP4 experts of gpt-oss": lambda: mxfp4.select_mxfp4_moe_backend(gpt_oss),
    }
    config = VllmConfig()
    text_config = SimpleNamespace(model_type="any")
    config.model_config = SimpleNamespace(quantization_config=None, hf_text_config=text_config)
    with set_current_vllm_config(config):
        return {kind: _name_choice(select) for kind, select in selections.items()}


def _name_choice(select: Callable[[], object]) -> str:
    """The class that a selection returns, beside its kind or as an instance; else its error."""
    try:
        chosen = select()
    except (ValueError, NotImplementedError) as error:
        return f"error: {str(error).strip().splitlines()[0]}"
    return chosen[1].__name__ if isinstance(chosen, tuple) else type(chosen).__name__


def _compile_with_nvrtc(major: int) -> str:
    """Compile a kernel of Humming as it does on a GPU; return the error, empty if it works."""
    from humming.device import current_device
    from humming.jit.compiler import NVRTCCompiler

    current_device._value = SimpleNamespace(is_ppu=False, sm_version=10 * major)
    architecture = f"{10 * major}a"
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text("#include <humming/kernel/humming_ws.cuh>\n")
        flags = NVRTCCompiler.get_flags(architecture)
        try:
            code, _, error = NVRTCCompiler._compile(str(source), folder, architecture, "", flags)
        except (RuntimeError, OSError) as failure:
            return str(failure)
    return error.strip().splitlines()[0] if code else ""


def _compile_sampler() -> str:
    """Compile FlashInfer's sampler as vLLM's warm-up does; return the error, empty if it works."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    from flashinfer.jit.sampling import gen_sampling_module

    try:
        gen_sampling_module().build_and_load()
    except (RuntimeError, OSError) as error:
        return str(error).strip().splitlines()[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())
