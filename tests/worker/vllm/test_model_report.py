"""The model that vLLM reports, from vLLM's own types."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cleave.perf.model import model_report as report_file
from cleave.perf.model.known_models import CONFIGS
from cleave.shm.load_page import ENV
from cleave_worker.vllm import model_report

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
torch = pytest.importorskip("torch")


def build_config(folder: Path, overrides: object = None) -> Any:
    hf_config = SimpleNamespace(to_dict=lambda: {"from": "vllm"})
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        hf_overrides=overrides or {},
        hf_config=hf_config,
        max_model_len=4096,
        dtype=torch.bfloat16,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
    )


def build_caches() -> Any:
    sizes: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 128,
        "dtype": torch.bfloat16,
    }
    full = interface.FullAttentionSpec(**sizes)
    windowed = interface.SlidingWindowSpec(**sizes, sliding_window=128)
    groups = [
        interface.KVCacheGroupSpec(["a", "b"], full),
        interface.KVCacheGroupSpec(["c"], windowed),
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def test_groups_have_their_layers_bytes_and_windows(tmp_path: Path) -> None:
    facts = model_report.build_facts(build_config(tmp_path), build_caches(), {})
    # Keys and values of 4 heads of 128 values of 2 bytes.
    assert [
        (g.kind, g.layers, g.bytes_per_token, g.window, g.state_bytes) for g in facts.groups
    ] == [("FullAttentionSpec", 2, 2 * 2048, 0, 0), ("SlidingWindowSpec", 1, 2048, 128, 0)]
    assert (facts.dtype, facts.kv_dtype, facts.tensor, facts.pipeline) == ("bfloat16", "auto", 2, 1)


def test_states_have_no_bytes_per_token(tmp_path: Path) -> None:
    states = interface.MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))
    caches = SimpleNamespace(kv_cache_groups=[interface.KVCacheGroupSpec(["a"], states)])
    (group,) = model_report.build_facts(build_config(tmp_path), caches, {}).groups
    assert (group.kind, group.layers, group.bytes_per_token) == ("MambaSpec", 1, 0)
    assert group.state_bytes == 4 * 8 * 4


BOTH = {
    "connectors": [
        {"kv_connector": "CleaveConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
        },
    ]
}


@pytest.mark.parametrize(
    ("connector", "extra"),
    [("MultiConnector", BOTH), ("OffloadingConnector", {"cpu_bytes_to_use": 1 << 30})],
)
def test_host_memory_is_counted_in_the_tokens_of_the_engines_blocks(
    connector: str, extra: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig

    names = [f"layer {number}" for number in range(32)]
    spec = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    page, num_blocks = spec.page_size_bytes, 1_000
    size = page * len(names) * num_blocks
    tensor = interface.KVCacheTensor(size, names, page * num_blocks, page)
    group = interface.KVCacheGroupSpec(names, spec)
    caches = interface.KVCacheConfig(num_blocks, [tensor], [group])
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )
    parallel = ParallelConfig(tensor_parallel_size=2)
    model = SimpleNamespace(
        model="m", dtype=torch.bfloat16, use_mla=False, get_total_num_kv_heads=lambda: 16
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=CacheConfig(block_size=16),
        parallel_config=parallel,
        kv_transfer_config=transfer,
        kv_events_config=None,
        use_v2_model_runner=False,
    )
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform), "get_device_name", classmethod(lambda *_: "NVIDIA H100 80GB HBM3")
    )
    memory = model_report.find_host_memory(config, caches)
    # On two GPUs a token has 2 x 32 layers of keys and values of 8 heads of 128 values of 2 bytes.
    assert memory.tokens == (1 << 30) // (2 * 32 * 4096)
    # Each GPU copies half, over PCIe 5.0.
    assert memory.token_ms == pytest.approx(32 * 4096 / (64e6 * 0.72), rel=0.01)
    monkeypatch.undo()
    assert model_report.find_host_memory(config, caches).token_ms == 2 * memory.token_ms
    transfer.kv_connector, transfer.kv_connector_extra_config = "NixlConnector", {}
    assert model_report.find_host_memory(config, caches) == report_file.HostMemoryFacts()


def test_host_memory_that_cannot_be_computed_leaves_the_rest_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_report, "_select_offloading", lambda _: object())
    facts = model_report.build_facts(build_config(tmp_path), build_caches(), {})
    assert facts.host_memory == report_file.HostMemoryFacts()
    assert len(facts.groups) == 2


def test_the_config_is_the_models_own_unless_options_change_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"]))
    config = build_config(tmp_path).model_config
    assert model_report.read_config(config) == CONFIGS["qwen3-8b"]
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = model_report.read_config(config)
    assert found == {**CONFIGS["qwen3-8b"], "quantization_config": beside}
    changed = build_config(tmp_path, {"num_hidden_layers": 2}).model_config
    assert model_report.read_config(changed) == {"from": "vllm"}


@pytest.fixture
def engine_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's engine core, whose caches are those of `build_caches`."""
    core = pytest.importorskip("vllm.v1.engine.core")
    caches = build_caches()
    monkeypatch.setattr(core.EngineCore, "_initialize_kv_caches", lambda *_: caches)
    return core.EngineCore


def test_the_engines_core_reports_once_its_caches_are_allocated(
    engine_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"]))
    monkeypatch.setenv(ENV, str(tmp_path / "load"))
    model_report.report_model()
    found = engine_core._initialize_kv_caches(None, build_config(tmp_path))
    assert len(found.kv_cache_groups) == 2
    written = json.loads(report_file.read(tmp_path / "load"))
    assert written["config"] == report_file.select_config(CONFIGS["qwen3-8b"])
    assert len(written["cacheGroups"]) == 2


def test_a_report_that_fails_leaves_the_engine_alone(
    engine_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tmp_path / "gone" / "load"))
    (tmp_path / "config.json").write_text("{}")
    model_report.report_model()
    assert engine_core._initialize_kv_caches(None, build_config(tmp_path)).kv_cache_groups


def test_an_engine_without_an_agent_is_left_alone(
    engine_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    before = engine_core._initialize_kv_caches
    model_report.report_model()
    assert engine_core._initialize_kv_caches is before
