"""What vLLM allocates for models of 2026, beside what Cleave computes from the same config.json.

    .venv/bin/python benchmarks/models/run.py      # writes vllm.yaml and the table of README.md

vLLM's own model classes are instantiated on the meta device, which has shapes but no memory, and
their layers say what cache they need. Kernels that this machine lacks are taken for present: they
do not change what is allocated before weights are loaded. Called by tests/benchmarks/models as
well. What is hard: the order of vLLM's initialisation, which is that of its own workers.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import yaml

from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape

FOLDER = Path(__file__).parent
MODELS, RECORDED, README = FOLDER / "models.yaml", FOLDER / "vllm.yaml", FOLDER / "README.md"
_BLOCK = 128
_MAX_MODEL_LEN = 1024
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_SHARED = ("embed_tokens.weight", "head.weight")
GIB = 2**30


@dataclass(frozen=True)
class Allocation:
    """What one engine with one GPU allocates for a model."""

    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Over all layers with KV; those with a window keep it for the last tokens only."""
    window_bytes_per_token: int
    """Of layers with a window, part of the above."""
    window_tokens: int
    state_bytes: int
    """Of one request of any length."""
    mtp_weight_bytes: int
    """Of multi-token prediction layers, without embedding and LM head, which are the model's."""
    mtp_kv_bytes_per_token: int


def read_configs() -> dict[str, dict[str, Any]]:
    """The configs by repository."""
    configs: dict[str, dict[str, Any]] = yaml.safe_load(MODELS.read_text())
    return configs


def read_recorded() -> dict[str, Allocation]:
    """What vLLM allocated, by repository."""
    recorded = yaml.safe_load(RECORDED.read_text())
    return {name: Allocation(**each) for name, each in recorded.items()}


def build_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Cleave's shape of a model."""
    return model_shape.from_config(name.partition("/")[2], config)


def compute_allocation(shape: ModelShape) -> Allocation:
    """What Cleave computes."""
    (window, windowed), *_ = shape.list_windows() if shape.sliding_window else ((0, 0),)
    per_layer = shape.kv_bytes_per_token // (shape.attention_layers or 1)
    others = shape.copied_bytes_per_token - shape.kv_bytes_per_token
    speculating = replace(shape, mtp_layers=shape.stored_mtp_layers)
    return Allocation(
        parameters=shape.parameters,
        weight_bytes=shape.weight_bytes,
        kv_bytes_per_token=shape.copied_bytes_per_token,
        window_bytes_per_token=windowed * per_layer + others,
        window_tokens=shape.windowed.tokens if shape.windowed else window,
        state_bytes=shape.compute_state_bytes(),
        mtp_weight_bytes=speculating.compute_mtp_bytes(),
        mtp_kv_bytes_per_token=speculating.kv_bytes_per_token - shape.kv_bytes_per_token,
    )


@contextmanager
def run_vllm() -> Iterator[None]:
    """vLLM's distributed environment of one process, with kernels of other machines."""
    import torch
    from vllm.distributed import destroy_distributed_environment, init_distributed_environment
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    choose_backend = CpuPlatform.get_attn_backend_cls
    sparse = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

    def get_attn_backend_cls(*args: Any, **options: Any) -> str:
        try:
            return str(choose_backend(*args, **options))
        except NotImplementedError:
            return sparse

    complete = FusedMoEConfig.__post_init__

    def complete_config(self: FusedMoEConfig) -> None:
        # Its check of the platform comes last.
        with suppress(NotImplementedError):
            complete(self)

    def inspect(self: _LazyRegisteredModel) -> _ModelInfo:
        # vLLM does so in a process for each class.
        return _ModelInfo.from_model_cls(self.load_model_cls())

    methods = "vllm.model_executor.layers"
    experts = MagicMock()
    changed: dict[str, Any] = {
        "torch.Tensor.item": _replace_on_meta(torch.Tensor.item, lambda _: 1),
        "torch.Tensor.tolist": _replace_on_meta(
            torch.Tensor.tolist, lambda own: torch.zeros(own.shape, device="cpu").tolist()
        ),
        "torch.Tensor.to": _replace_on_meta(torch.Tensor.to, lambda own: own),
        "torch.Tensor.cpu": _replace_on_meta(torch.Tensor.cpu, lambda own: own),
        f"{methods}.quantization.fp8.init_fp8_linear_kernel": MagicMock(),
        f"{methods}.quantization.fp8.select_fp8_moe_backend": lambda *_, **__: (
            Fp8MoeBackend.TRITON,
            experts,
        ),
        f"{methods}.quantization.mxfp4.select_mxfp4_moe_backend": lambda *_, **__: (
            Mxfp4MoeBackend.TRITON,
            experts,
        ),
        f"{methods}.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend": (
            lambda *_, **__: (UnquantizedMoeBackend.TRITON, experts)
        ),
        f"{methods}.fused_moe.config.FusedMoEConfig.__post_init__": complete_config,
        # Otherwise states have 32 bits on CPUs with AVX-512.
        "torch.cpu._is_avx512_bf16_supported": lambda: False,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))
        for path, replacement in changed.items():
            stack.enter_context(patch(path, replacement))
        stack.enter_context(patch.object(_LazyRegisteredModel, "inspect_model_cls", inspect))
        stack.enter_context(
            patch.object(CpuPlatform, "get_attn_backend_cls", staticmethod(get_attn_backend_cls))
        )
        torch.set_default_dtype(torch.bfloat16)
        stack.callback(torch.set_default_dtype, torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            init_workspace_manager(torch.device("cpu"))
            try:
                yield
            finally:
                reset_workspace_manager()
                destroy_distributed_environment()


def _replace_on_meta(method: Callable[..., Any], own: Callable[[Any], Any]) -> Callable[..., Any]:
    """A tensor's method that also has an answer where there are no values."""

    def replaced(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (NotImplementedError, RuntimeError):
            if not self.is_meta:
                raise
            return own(self)

    return replaced


def measure(config: Mapping[str, Any]) -> Allocation:
    """What vLLM allocates for a config, within `run_vllm`."""
    found = _instantiate(config, speculates=False)
    if not any(config.get(name) for name in _MTP_FIELDS):
        return found
    draft = _instantiate(config, speculates=True)
    return replace(
        found,
        mtp_weight_bytes=draft.weight_bytes,
        mtp_kv_bytes_per_token=draft.kv_bytes_per_token,
    )


def _instantiate(config: Mapping[str, Any], *, speculates: bool) -> Allocation:
    """The model, or its layers of multi-token prediction without embedding and LM head."""
    built, specs = build_model(config, speculates=speculates)
    weights = [
        weight
        for name, weight in built.named_parameters()
        if not (speculates and name.endswith(_SHARED))
    ]
    return _sum_up(weights, specs)


def build_model(config: Mapping[str, Any], *, speculates: bool = False) -> tuple[Any, list[Any]]:
    """vLLM's model on the meta device, and what each of its layers caches, within `run_vllm`.
    `speculates`: its layers of multi-token prediction instead."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import destroy_model_parallel, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=_MAX_MODEL_LEN, enforce_eager=True,
        )  # fmt: skip
        parallel, draft = ParallelConfig(), None
        if speculates:
            draft = SpeculativeConfig(
                method="mtp", num_speculative_tokens=1, target_model_config=model,
                target_parallel_config=parallel,
            )  # fmt: skip
        kinds = getattr(model.hf_text_config, "layer_types", None) or ["sliding_attention"]
        # As `EngineArgs.create_engine_config` does.
        is_windowed = all(each == "sliding_attention" for each in kinds)
        cache = CacheConfig(
            block_size=_BLOCK,
            enable_prefix_caching=False,
            sliding_window=model.get_sliding_window() if is_windowed else None,
            cache_dtype=resolve_kv_cache_dtype_string("auto", model),
        )
        vllm = VllmConfig(
            model_config=model,
            cache_config=cache,
            parallel_config=parallel,
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format="dummy"),
            speculative_config=draft,
        )
        with set_current_vllm_config(vllm):
            initialize_model_parallel(1, 1)
            try:
                with torch.device("meta"):
                    built = initialize_model(
                        vllm, prefix="", model_config=draft.draft_model_config if draft else model
                    )
                layers = vllm.compilation_config.static_forward_context.values()
                specs = [
                    layer.get_kv_cache_spec(vllm)
                    for layer in layers
                    if hasattr(layer, "get_kv_cache_spec")
                ]
            finally:
                destroy_model_parallel()
    return built, [spec for spec in specs if spec is not None]


def _sum_up(weights: list[Any], specs: list[Any]) -> Allocation:
    from vllm.v1.kv_cache_interface import MambaSpec

    windows: dict[int, int] = {}
    per_token = state_bytes = 0
    for spec in specs:
        if isinstance(spec, MambaSpec):
            state_bytes += spec.page_size_bytes
            continue
        size = spec.page_size_bytes // spec.block_size
        per_token += size
        names = ("sliding_window", "attention_chunk_size")
        window = next(filter(None, (getattr(spec, name, None) for name in names)), 0)
        windows[window] = windows.get(window, 0) + size
    windows.pop(0, None)
    ((tokens, size),) = windows.items() or ((0, 0),)
    return Allocation(
        parameters=sum(each.numel() for each in weights),
        weight_bytes=sum(each.numel() * each.element_size() for each in weights),
        kv_bytes_per_token=per_token,
        window_bytes_per_token=size,
        window_tokens=tokens,
        state_bytes=state_bytes,
        mtp_weight_bytes=0,
        mtp_kv_bytes_per_token=0,
    )


def build_table(recorded: Mapping[str, Allocation]) -> str:
    """The table for readers, in Markdown."""
    rows = [
        (
            "| model | weights GiB | vLLM | difference | KV bytes per token | vLLM "
            "| of these in a window | bytes of states | vLLM | GiB of MTP layers | vLLM |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, config in read_configs().items():
        ours, theirs = compute_allocation(build_shape(name, config)), recorded.get(name)
        window = f"{ours.window_bytes_per_token:,} of {ours.window_tokens:,} tokens"
        cells = [
            name,
            f"{ours.weight_bytes / GIB:,.2f}",
            f"{theirs.weight_bytes / GIB:,.2f}" if theirs else "not compared",
            f"{ours.weight_bytes / theirs.weight_bytes - 1:+.3%}" if theirs else "",
            f"{ours.kv_bytes_per_token:,}",
            f"{theirs.kv_bytes_per_token:,}" if theirs else "not compared",
            window if ours.window_tokens else "",
            f"{ours.state_bytes:,}" if ours.state_bytes else "",
            f"{theirs.state_bytes:,}" if theirs and theirs.state_bytes else "",
            f"{ours.mtp_weight_bytes / GIB:,.2f}" if ours.mtp_weight_bytes else "",
            f"{theirs.mtp_weight_bytes / GIB:,.2f}" if theirs and theirs.mtp_weight_bytes else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Measure all models and write what was found; prints the models that vLLM does not build."""
    recorded = {}
    with run_vllm():
        for name, config in read_configs().items():
            try:
                recorded[name] = measure(config)
            except (ImportError, RuntimeError, ValueError) as error:
                print(f"{name}: {type(error).__name__}: {error}"[:300])
    text = yaml.safe_dump({name: asdict(each) for name, each in recorded.items()}, sort_keys=False)
    RECORDED.write_text("# Written by benchmarks/models/run.py: what vLLM 0.32 allocates.\n" + text)
    write_table("table", build_table(recorded))


def write_table(name: str, table: str) -> None:
    """Put a table into README.md, between the comments with its name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of the {name} -->\n"
    before, _, rest = README.read_text().partition(begin)
    _, _, after = rest.partition(end)
    README.write_text(before + begin + table + end + after)


if __name__ == "__main__":
    main()
