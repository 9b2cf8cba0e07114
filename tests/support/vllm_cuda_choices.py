"""Kernels that vLLM selects on NVIDIA GPUs: `python vllm_cuda_choices.py ENGINE_ARGUMENT...`.

Runs vLLM's selection code in the Python files that its CPU and CUDA wheels share; GPU, extension
modules, FlashInfer and DeepGEMM are stubs. Prints JSON: choices by compute capability. test_kernels
runs it in a separate process.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

CAPABILITIES = ((9, 0), (10, 0))
"""Hopper, Blackwell."""
EXTENSIONS = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
STAND_INS = ("flashinfer", "deep_gemm", *(f"vllm.{each}" for each in EXTENSIONS))


class Anything(ModuleType):
    """A package with every attribute that is imported from it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stubs and their submodules."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{each}.") for each in STAND_INS):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = Anything(spec.name)
        module.check_cuda_arch = lambda: None  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def pretend_to_be_on_a_gpu() -> type[Any]:
    """Replace vLLM's platform by a GPU; return its class, whose `capability` can be set."""
    sys.meta_path.insert(0, Finder())
    import torch
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Gpu(cuda.CudaPlatformBase):
        capability = CAPABILITIES[0]

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.capability)

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 13

    vllm.platforms._current_platform = Gpu()
    empty = torch.empty
    torch.empty = lambda *a, **k: empty(*a, **k | ({"device": "meta"} if "device" in k else {}))
    torch.accelerator.current_device_index = lambda: 0
    torch.ops._C.cutlass_scaled_mm_supports_block_fp8 = lambda _: True
    from vllm.triton_utils import triton

    triton.Config = lambda *_, **__: SimpleNamespace(num_stages=1)
    return Gpu


def main(arguments: list[str]) -> dict[str, dict[str, object]]:
    """The choices of an engine process, after it has loaded its plug-ins."""
    gpu = pretend_to_be_on_a_gpu()
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    import torch
    from vllm.config import SchedulerConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.device_communicators import flashinfer_all_reduce
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.deep_gemm import is_deep_gemm_supported
    from vllm.v1.attention.backends.mla.prefill.flashinfer import FlashInferPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.trtllm_ragged import TrtllmRaggedPrefillBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    gdn: Any = SimpleNamespace(
        additional_config={"gdn_prefill_backend": parsed.gdn_prefill_backend or "auto"},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(linear_key_head_dim=128)),
    )

    def attention(**features: Any) -> list[str]:
        config = AttentionSelectorConfig(
            dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, **features
        )
        capability = gpu.get_device_capability()
        with set_current_vllm_config(VllmConfig()):
            found, _ = gpu.get_valid_backends(capability, config, num_heads=32)
        return [each.backend.name for each in found]

    engine = VllmConfig(
        kv_transfer_config=parsed.kv_transfer_config,
        scheduler_config=SchedulerConfig.default_factory(async_scheduling=parsed.async_scheduling),
    )
    choices: dict[str, dict[str, object]] = {}
    for gpu.capability in CAPABILITIES:
        choices[".".join(map(str, gpu.capability))] = {
            "sampler": flashinfer_sampler_supported(),
            "deep_gemm": is_deep_gemm_supported.__wrapped__(),
            "attention": attention(head_size=128),
            "latent attention": attention(head_size=576, use_mla=True),
            "latent attention of prompts": [
                each.get_name()
                for each in (FlashInferPrefillBackend, TrtllmRaggedPrefillBackend)
                if each.is_available()
            ],
            "gated delta net": qwen_gdn_linear_attn._resolve_gdn_prefill_backend(gdn)[1],
            "all-reduce": flashinfer_all_reduce.fi_ar_available,
            "connector": engine.kv_transfer_config.kv_connector,
            "asynchronous scheduling": engine.scheduler_config.async_scheduling,
            "iterations in flight": engine.max_concurrent_batches,
        }
    return choices


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
