from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave.perf.model.attention import LatentAttention  # noqa: E402
from cleave.perf.profile import operator_fit, profile  # noqa: E402
from cleave_worker.profiler import collectives  # noqa: E402
from cleave_worker.profiler.__main__ import main  # noqa: E402
from cleave_worker.profiler.clock import CpuClock, summarize  # noqa: E402
from cleave_worker.profiler.measure import build_full_grid, build_quick_grid, measure  # noqa: E402
from cleave_worker.profiler.operators import (  # noqa: E402
    AttentionOperator,
    DeviceSpec,
    Shard,
    ShardError,
    build_iteration_operators,
    build_layer_operators,
)

ROWS = 5


@pytest.fixture
def place() -> DeviceSpec:
    return DeviceSpec(torch.device("cpu"), torch.float32)


def sizes(shard: Shard, place: DeviceSpec) -> dict[str, tuple[int, ...]]:
    """Operator -> shape of what it makes of ROWS rows."""
    return {
        op.name: tuple(op.build_run(ROWS)(0).shape) for op in build_layer_operators(shard, place)
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_shard_has_its_share_of_heads_and_of_the_mlp(shape, place: DeviceSpec, size: int) -> None:
    kv_heads = max(1, 2 // size)
    assert sizes(Shard(shape, size), place) == {
        "norm": (ROWS, 64),
        "qkv": (ROWS, (4 // size + 2 * kv_heads) * 16),
        "rotary": (ROWS, 4 // size + kv_heads, 16),
        "attention_out": (ROWS, 64),
        "mlp_up": (ROWS, 2 * 96 // size),
        "mlp_activation": (ROWS, 96 // size),
        "mlp_down": (ROWS, 64),
    }


def test_what_only_some_layers_have_counts_for_its_share(sparse, place: DeviceSpec) -> None:
    weights = {op.name: op.weight for op in build_layer_operators(Shard(sparse, 1), place)}
    assert weights["mlp_up"] == 0.25
    assert weights["experts_up"] == weights["router"] == weights["shared_down"] == 0.75
    assert weights["norm"] == 2


@pytest.mark.parametrize(("rows", "touched", "each"), [(1, 2, 1), (4, 5, 2), (400, 8, 100)])
def test_experts_run_together_as_many_as_are_touched(
    sparse, place: DeviceSpec, rows: int, touched: int, each: int
) -> None:
    (up,) = [op for op in build_layer_operators(Shard(sparse, 1), place) if op.name == "experts_up"]
    assert tuple(up.build_run(rows)(0).shape) == (touched, each, 2 * 32)


def test_the_lm_head_is_split_over_the_vocabulary(shape, place: DeviceSpec) -> None:
    operators = {
        op.name: tuple(op.build_run(3)(0).shape)
        for op in build_iteration_operators(Shard(shape, 2), place)
    }
    assert operators == {"embedding": (3, 64), "lm_head": (3, 64)}


def test_a_chunk_attends_to_what_is_cached_and_to_itself_up_to_each_row(
    shape, place: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[torch.Tensor] = []
    empty = DeviceSpec.make_tensor

    def keep(self: DeviceSpec, *sizes: int) -> torch.Tensor:
        drawn.append(empty(self, *sizes))
        return drawn[-1]

    monkeypatch.setattr(DeviceSpec, "make_tensor", keep)
    got = AttentionOperator(Shard(shape, 1), place).build_prefill(3, 5)(0)
    q, k, v = drawn
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    for row in range(3):
        seen = 5 + row + 1
        weights = torch.softmax(q[:, :, row : row + 1] @ k[:, :, :seen].mT / 4, dim=-1)
        torch.testing.assert_close(got[:, :, row : row + 1], weights @ v[:, :, :seen])


def test_decoding_makes_one_row_for_each_query_head(shape, place: DeviceSpec) -> None:
    inputs = AttentionOperator(Shard(shape, 1), place).build_decode(batch=3, context_tokens=20)(0)
    assert tuple(inputs.shape) == (3 * 2, 2, 16), "requests x KV heads, heads of a group, size"


def test_what_cannot_be_measured_is_refused(shape) -> None:
    with pytest.raises(ShardError, match="4 attention heads cannot be sharded over 3"):
        Shard(shape, 3)
    latent = LatentAttention(0, 32, 16, 8, 16)
    with pytest.raises(ShardError, match="MLA"):
        Shard(replace(shape, latent=latent), 1)


def test_every_point_of_the_grid_is_measured_once(shape, place: DeviceSpec, clock) -> None:
    small = replace(build_quick_grid(64), collective_bytes=())
    found = measure(shape, (1, 2), clock, place, small, 1, lambda _: None)
    operators = 7 * len(small.rows) + len(small.rows) + len(small.head_rows)
    attention = len(small.chunks) + len(small.batches) * len(small.contexts)
    assert len(clock.results) == 2 * (operators + attention)
    norms = [point for point in found.layer if point.operator == "norm"]
    assert norms[0].ms == 2.0, "the first measured, used twice in a layer"
    assert len(norms) == 2 * len(small.rows)
    assert operator_fit.list_tensor_parallel_sizes(found) == (1,), "no collectives for 2"


def test_the_full_grid_ascends_and_has_no_point_twice() -> None:
    full = build_full_grid(8192)
    for values in (full.rows, full.head_rows, full.batches, full.contexts):
        assert list(values) == sorted(set(values))
    assert len(set(full.chunks)) == len(full.chunks)
    assert max(full.rows) == 8192


def test_repeats_become_a_median_and_the_distance_of_their_quartiles() -> None:
    assert summarize([5.0])["spread_ms"] == 0
    found = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found["ms"], found["spread_ms"]) == (3.0, 2.0)


def test_the_clock_of_a_cpu_gives_the_requested_number_of_times() -> None:
    times = CpuClock().measure(lambda _: sum(range(1000)), 4)
    assert len(times) == 4
    assert min(times) > 0


def test_collectives_run_between_processes() -> None:
    reduced, sent = collectives.measure(2, [1024, 4096], repeats=2, on_gpu=False)
    assert set(reduced) == set(sent) == {1024, 4096}
    assert all(len(times) == 2 and min(times) > 0 for times in reduced.values())


def test_the_command_writes_a_profile_that_gives_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,'
        ' "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,'
        ' "max_position_embeddings": 256, "torch_dtype": "float32"}'
    )
    out = tmp_path / "operators.json"
    words = ["--cpu", "--quick", "--longest", "64", "--tensor-parallel-sizes", "1"]
    words += ["--dtype", "float32", "--model", str(tmp_path), "-O", str(out)]
    assert main(words) == 0
    found = profile.read_profile(out)
    assert (found.engine, found.operators.num_layers) == ("torch", 2)
    timing = operator_fit.to_timing(found.operators, 1)
    assert timing.predict_prefill_ms([64]) > 0
    assert timing.predict_decode_ms(4, 256) > 0


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (["--model", "nobody/nothing", "--cpu"], 1, "nobody/nothing"),
        (["--model", "opt-13b"], 1, "no GPU; --cpu"),
        (["--model", "opt-13b", "--longest", "9"], 2, "must be 64 or more"),
        (["--model", "opt-13b", "--tensor-parallel-sizes", "0,1"], 2, "must be 1 or more"),
        (["--model", "opt-13b", "--tensor-parallel-sizes", "3", "--cpu"], 1, "cannot be sharded"),
    ],
)
def test_a_fault_is_one_line(
    words: list[str], code: int, fault: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available() and "no GPU" in fault:
        pytest.skip("there is a GPU")
    try:
        ended = main([*words, "-O", str(tmp_path / "x.json")])
    except SystemExit as end:
        ended = end.code
    assert ended == code
    (line,) = capfd.readouterr().err.splitlines()
    assert fault in line
