"""What vLLM's configuration says of a rank's KV, and what cannot be moved."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.handoff import KvLayout  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape, ShardSpec  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
LAYOUT = KvLayout("tiny@", "torch.float32", 32, 5, 4, 64, "(32, 128)")


@pytest.fixture(scope="module")
def module() -> Any:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv import layout

    return layout


def config(tensor: int = 1, pipeline: int = 1, *, mla: bool = False) -> Any:
    model = SimpleNamespace(
        model="tiny",
        revision=None,
        use_mla=mla,
        dtype=torch.float32,
        get_total_num_hidden_layers=lambda: 5,
        get_total_num_kv_heads=lambda: 4,
        get_head_size=lambda: 64,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
        ),
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"),
    )


def cache(heads: int, blocks: int = 7) -> Any:
    return torch.zeros(blocks, heads, 32, 128)


def test_stages_begin_where_vllm_begins_them(module: Any) -> None:
    assert module.build_shape(config()) == ParallelShape(1, (0,))
    # The layer that is left over is not the last stage's, which has the output embedding.
    assert module.build_shape(config(tensor=2, pipeline=2)) == ParallelShape(2, (0, 3))


def test_a_layout_is_the_same_for_every_shape(module: Any) -> None:
    one = module.build_layout(config(), cache(4))
    assert one == module.build_layout(config(tensor=2), cache(2))
    assert (one.model, one.num_kv_heads, one.num_layers, one.block_size) == ("tiny@", 4, 5, 32)
    assert one.arrangement.startswith("(32, 128) "), "and the instruction set"
    assert module.build_layout(config(mla=True), cache(1)).num_kv_heads == 1


def test_caches_of_bytes_that_are_read_differently_have_different_layouts(module: Any) -> None:
    def describe(kv_cache_dtype: str) -> KvLayout:
        described = config()
        described.cache_config.cache_dtype = kv_cache_dtype
        # The layout of the CPU's kernels is not defined for these types.
        described.model_config.use_mla = False
        return module.build_layout(described, cache(4).to("meta", torch.uint8))

    one, other = describe("fp8_e4m3"), describe("fp8_e5m2")
    assert "dtype is 'torch.uint8 as fp8_e5m2'" in one.find_difference(other)
    assert describe("fp8_e4m3") == one
    assert module.build_layout(config(), cache(4)).dtype == "torch.float32"


def test_what_a_rank_should_hold_passes(module: Any) -> None:
    module.check_layout(ShardSpec(ParallelShape(2, (0, 3)), 3, (3, 4)), LAYOUT, [cache(2)] * 2, 7)


@pytest.mark.parametrize(
    ("share", "caches", "fault"),
    [
        (ShardSpec(ParallelShape(3), 0), [cache(1)], "4 KV heads cannot be sharded over 3 tensor"),
        (ShardSpec(ParallelShape(1, (0, 3)), 0, (3,)), [cache(4)], "cannot have layers"),
        (ShardSpec(ParallelShape(2), 0), [cache(4)], "does not have 2 heads"),
        (ShardSpec(ParallelShape(2), 0), [torch.zeros(7, 32, 128)], "does not have 2 heads"),
        (
            ShardSpec(ParallelShape(2), 0),
            [cache(2, blocks=14)],
            "splits 7 blocks of 32 tokens into 14",
        ),
    ],
)
def test_what_cannot_be_moved_ends_the_engine_with_one_line(
    module: Any, share: ShardSpec, caches: list[Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        module.check_layout(share, LAYOUT, caches, 7)


def test_a_layout_has_the_weights_that_the_agent_found(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = []
    for weights in ("", "a1", "b2"):
        monkeypatch.setenv("CLEAVE_WEIGHTS", weights)
        layouts.append(module.build_layout(config(), cache(4)))
    none, one, other = layouts
    assert one.find_difference(other) == "weights is 'b2' at the producer and 'a1' at the consumer"
    assert none.find_difference(one)
    # What an earlier version sends has none.
    assert none.weights == LAYOUT.weights == ""
