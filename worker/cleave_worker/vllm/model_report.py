"""Reports the model that vLLM serves: its config.json and the caches that vLLM allocates for it.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine. Only the engine's core knows both the config and the groups of KV caches,
once it has allocated them; so its method that does is extended. A core is forked from the API
server, which imports its module anyway, or spawned; a worker does not import it for this. A report
only helps plans: a fault in it is logged, and the engine serves.
"""

import copy
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cleave.perf.hardware.gpu import Gpu, UnknownGpuError, find_gpu
from cleave.perf.hardware.link import build_host_link
from cleave.perf.model import config_parts, model_report
from cleave.perf.model.model_report import EngineFacts, GroupFacts, HostMemoryFacts, SizeFacts
from cleave.shm.load_page import ENV
from cleave_worker.vllm import model_sizes

_log = logging.getLogger(__name__)
_OFFLOADING = "OffloadingConnector"
_CORE, _METHOD = "vllm.v1.engine.core", "_initialize_kv_caches"


def report_model() -> None:
    """Let the engine's core of this process report its model once its caches are allocated."""
    is_child = multiprocessing.parent_process() is not None
    if ENV not in os.environ or (is_child and _CORE not in sys.modules):
        return
    from vllm.v1.engine.core import EngineCore

    allocate = getattr(EngineCore, _METHOD)

    def allocate_and_report(self: Any, vllm_config: Any) -> Any:  # noqa: ANN401
        kv_caches = allocate(self, vllm_config)
        try:
            facts = build_facts(vllm_config, kv_caches, read_config(vllm_config.model_config))
            facts = replace(facts, sizes=find_sizes(self, vllm_config))
            model_report.write(Path(os.environ[ENV]), facts)
        except Exception:  # noqa: BLE001 - the engine serves without a report
            _log.exception("the model is not reported to the operator")
        return kv_caches

    setattr(EngineCore, _METHOD, allocate_and_report)


def read_config(model_config: Any) -> Mapping[str, object]:  # noqa: ANN401
    """The model's own config.json; where there is none, or options change it, vLLM's form of it."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    where = model_config.model, model_config.revision
    own = get_hf_file_to_dict("config.json", *where)
    if own is None or model_config.hf_overrides:
        converted: Mapping[str, object] = model_config.hf_config.to_dict()
        return converted
    if own.get("quantization_config"):
        return dict(own)
    beside = get_hf_file_to_dict(config_parts.QUANTIZATION_FILE, *where)
    return config_parts.with_quantization(dict(own), beside)


def find_sizes(core: Any, vllm_config: Any) -> SizeFacts | None:  # noqa: ANN401
    """What an engine's core knows about the model's layers and weights; None where that fails: what
    else is reported does not depend on it."""
    model = vllm_config.model_config
    try:
        return SizeFacts(
            layers=model.get_total_num_hidden_layers(),
            hidden_size=model.get_hidden_size(),
            attention_heads=model.model_arch_config.total_num_attention_heads,
            # With latents every GPU caches the same.
            kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            vocab_size=model.get_vocab_size(),
            **model_sizes.collect_weights(core.model_executor, vllm_config.parallel_config),
        )
    except Exception:  # noqa: BLE001
        _log.exception("the model's sizes are not reported to the operator")
        return None


def build_facts(
    vllm_config: Any,  # noqa: ANN401
    kv_caches: Any,  # noqa: ANN401
    config: Mapping[str, object],
) -> EngineFacts:
    """What vLLM knows about its model; `kv_caches`: its KVCacheConfig."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    return EngineFacts(
        config=config,
        max_model_len=model.max_model_len,
        block_size=cache.block_size,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=cache.cache_dtype,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        groups=[*_list_groups(kv_caches.kv_cache_groups)],
        host_memory=find_host_memory(vllm_config, kv_caches),
    )


def find_host_memory(vllm_config: Any, kv_caches: Any) -> HostMemoryFacts:  # noqa: ANN401
    """The host memory that vLLM's OffloadingConnector will have, by its own computation, in the
    tokens that agents count of the GPU's KV. That each GPU copies its share over PCIe at the rate
    of `cleave.perf.hardware` is assumed until copies are measured. None where vLLM's computation
    fails: what else is reported does not depend on it."""
    config = _select_offloading(vllm_config)
    if config is None:
        return HostMemoryFacts()
    try:
        return _compute_host_memory(config, kv_caches)
    except Exception:  # noqa: BLE001
        _log.exception("KV in host memory is not reported to the operator")
        return HostMemoryFacts()


def _compute_host_memory(config: Any, kv_caches: Any) -> HostMemoryFacts:  # noqa: ANN401
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    offloading = build_offloading_config(config, kv_caches)
    spec = OffloadingSpecFactory.create_spec(offloading)
    block_size = config.cache_config.block_size
    # A token takes a block in each group.
    token_bytes = offloading.worker_kv_bytes_per_block * len(offloading.groups) / block_size
    link = build_host_link(_find_gpu())
    tokens = spec.num_chunks * spec.blocks_per_chunk * block_size
    return HostMemoryFacts(tokens, token_bytes / (link.effective_gb_per_s * 1e6))


def _select_offloading(vllm_config: Any) -> Any:  # noqa: ANN401
    """The configuration that OffloadingConnector gets, alone or in MultiConnector; or None."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector == _OFFLOADING:
        return transfer and vllm_config
    from vllm.config import KVTransferConfig

    for each in transfer.kv_connector_extra_config.get("connectors", ()):
        if each["kv_connector"] == _OFFLOADING:
            config = copy.copy(vllm_config)
            config.kv_transfer_config = KVTransferConfig(**each, engine_id=transfer.engine_id)
            return config
    return None


def _find_gpu() -> Gpu | None:
    from vllm.platforms import current_platform

    try:
        return find_gpu(current_platform.get_device_name())
    except (UnknownGpuError, NotImplementedError):
        return None


def _list_groups(groups: Iterable[Any]) -> Iterator[GroupFacts]:
    for group in groups:
        spec = group.kv_cache_spec
        # Layers of several sizes, as sparse attention has: one spec for each.
        each = getattr(spec, "kv_cache_specs", None)
        specs = [*each.values()] if each else [spec] * len(group.layer_names)
        yield GroupFacts(
            kind=type(specs[0]).__name__,
            layers=len(specs),
            block_size=specs[0].block_size,
            bytes_per_token=sum(map(_count_token_bytes, specs)),
            window=_find_window(specs[0]),
            state_bytes=sum(map(_count_state_bytes, specs)),
        )


def _count_token_bytes(spec: Any) -> int:  # noqa: ANN401
    """Bytes of a token in one layer; 0 for states, which do not grow with the tokens."""
    size = getattr(spec, "unpadded_page_size_bytes", None)
    return 0 if size is None else int(size) // int(spec.block_size)


def _count_state_bytes(spec: Any) -> int:  # noqa: ANN401
    """Bytes of a request's state in one layer; 0 for caches of tokens."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return int(spec.state_content_size_bytes) if isinstance(spec, MambaSpec) else 0


def _find_window(spec: Any) -> int:  # noqa: ANN401
    names = ("sliding_window", "attention_chunk_size")
    return next((int(size) for name in names if (size := getattr(spec, name, None))), 0)
