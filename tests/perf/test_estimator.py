"""Which source answers, and what is said where none can."""

from pathlib import Path

import pytest

from cleave.api.cluster import Cluster
from cleave.api.manifest import ManifestError
from cleave.api.planning import GpuChoice
from cleave.perf import estimator, known_errors, named_profiles
from cleave.perf.estimate import Estimate, Estimator, LatencySource
from cleave.perf.estimator import ModelEstimator
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.model import model_shape
from cleave.perf.profile import profile

from tests.support import measured_profiles

A100, H100 = "A100-SXM-80GB", "H100-SXM-80GB"
CLUSTER = Cluster.model_validate(
    {"nodes": [{"count": 4, "gpu": A100}, {"count": 2, "gpu": "NVIDIA-H100-80GB-HBM3"}]}
)
CAPPED = GpuChoice.model_validate({"type": H100, "powerCapWatts": 350})


def of(name: str, **options: object) -> ModelEstimator:
    return estimator.build_estimator(model_shape.load_shape(name), CLUSTER, **options)


def known(found: Estimate | None) -> Estimate:
    assert found is not None
    return found


def write(tmp_path: Path, **header: object) -> Cluster:
    profile.write_profile(measured_profiles.from_fit(**header), tmp_path / "opt.yaml")
    return CLUSTER.model_copy(update={"profiles": ["opt.yaml"]})


def test_it_is_what_the_planner_asks_for() -> None:
    built: Estimator = of("opt-13b")
    assert built.estimate(A100, 1, 1) is not None


def test_today_s_kernels_answer_for_a_model_that_distserve_measured() -> None:
    found = known(of("facebook/opt-13b").estimate(A100, 2, 1))
    assert found.confidence.kind is LatencySource.KERNELS
    assert found.confidence.serving is None, "no published run of today's vLLM is of A100"
    of_2023 = named_profiles.load_profile("distserve/opt-13b/tp2").timing
    assert found.timing.predict_decode_ms(16, 8000) < 0.9 * of_2023.predict_decode_ms(16, 8000)
    assert (found.power_watts, found.cost_per_hour) == (800, pytest.approx(6.86))
    assert found.max_model_len == 2048


def test_today_s_kernels_answer_for_a_model_that_was_measured_with_the_vllm_of_2023() -> None:
    found = known(of("llama-2-70b").estimate(H100, 4, 1))
    assert found.confidence.kind is LatencySource.KERNELS
    like = known(of("llama-3.1-70b").estimate(H100, 4, 1))
    assert found.timing.predict_decode_ms(16, 12_000) == pytest.approx(
        like.timing.predict_decode_ms(16, 12_000), rel=0.03
    )


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_kernels_answer_for_models_that_were_not_measured(tensor: int) -> None:
    found = known(of("llama-3.1-8b").estimate(H100, tensor, 1))
    assert found.confidence.kind is LatencySource.KERNELS
    assert "aiconfigurator-core 0.12.0" in found.confidence.source
    assert "vLLM 0.24.0" in found.confidence.source
    assert found.confidence.serving is known_errors.KERNELS[H100]


def test_stages_have_no_error_of_runs_without_them() -> None:
    staged = known(of("llama-3.1-8b").estimate(H100, 1, 2)).confidence
    assert (staged.kind, staged.serving, staged.has_stages) == (LatencySource.KERNELS, None, True)


def test_stages_of_today_s_engines_have_bubbles() -> None:
    whole, staged = (known(of("llama-3.1-8b").estimate(H100, 1, n)).timing for n in (1, 4))
    hops_ms = 3 * (staged.hop_ms + 16 * staged.hop_token_ms)
    expected = 1.23 * whole.predict_decode_ms(16, 12_000) + hops_ms
    assert staged.predict_decode_ms(16, 12_000) == pytest.approx(expected)
    assert staged.predict_prefill_ms([512]) > 1.23 * whole.predict_prefill_ms([512])


@pytest.mark.parametrize("gpu", ["L4", "MI300X"])
def test_the_roofline_answers_where_no_kernel_was_measured(gpu: str) -> None:
    cluster = Cluster.model_validate({"nodes": [{"count": 1, "gpu": gpu}]})
    built = estimator.build_estimator(model_shape.load_shape("opt-13b"), cluster)
    found = known(built.estimate(find_gpu(gpu).name, 4, 1))
    assert found.confidence.kind is LatencySource.ROOFLINE
    assert found.confidence.serving is None, "it was never compared with measurements there"


@pytest.mark.parametrize(
    ("noise", "kind"), [(0.01, LatencySource.MEASURED), (0.5, LatencySource.KERNELS)]
)
def test_the_source_that_is_known_to_err_least_answers(
    tmp_path: Path, noise: float, kind: LatencySource
) -> None:
    cluster = write(tmp_path, noise=noise, device=H100)
    built = estimator.build_estimator(model_shape.load_shape("opt-13b"), cluster, folder=tmp_path)
    found = known(built.estimate(H100, 1, 1))
    assert found.confidence.kind is kind
    source = "vllm on H100-SXM-80GB, measured 2026-11-21"
    is_left_aside = kind is LatencySource.KERNELS
    assert (f"; not {source}, whose error is " in found.confidence.source) is is_left_aside
    assert found.kv_capacity_tokens == 60_000, "the profile's, whatever its times"


@pytest.mark.parametrize("gpu", sorted(known_errors.KERNELS.keys() & known_errors.ROOFLINE.keys()))
def test_tables_err_less_than_the_roofline_wherever_both_were_compared(gpu: str) -> None:
    cluster = Cluster.model_validate({"nodes": [{"gpu": gpu}]})
    built = estimator.build_estimator(model_shape.load_shape("llama-3.1-8b"), cluster)
    assert known(built.estimate(gpu, 1, 1)).confidence.kind is LatencySource.KERNELS


def test_a_measured_profile_comes_before_sources_of_unknown_error(tmp_path: Path) -> None:
    cluster = write(tmp_path)
    built = estimator.build_estimator(model_shape.load_shape("opt-13b"), cluster, folder=tmp_path)
    found = known(built.estimate(A100, 1, 1))
    assert found.confidence.kind is LatencySource.MEASURED
    assert found.kv_capacity_tokens == 60_000
    # The profile says nothing of two GPUs; of two stages it does.
    assert known(built.estimate(A100, 2, 1)).confidence.kind is LatencySource.KERNELS
    staged = known(built.estimate(A100, 1, 2))
    assert staged.confidence.kind is LatencySource.MEASURED
    assert staged.timing.stages == 2


def test_a_profile_of_another_model_or_device_is_left_aside(tmp_path: Path) -> None:
    for header in ({"model": "opt-66b"}, {"device": "H100"}):
        cluster = write(tmp_path, **header)
        built = estimator.build_estimator(
            model_shape.load_shape("opt-13b"), cluster, folder=tmp_path
        )
        assert known(built.estimate(A100, 1, 1)).confidence.kind is LatencySource.KERNELS


def test_operators_serve_the_sizes_that_were_measured(tmp_path: Path) -> None:
    operators = measured_profiles.operators()
    cluster = write(tmp_path, device="h100", prefill=(), decode=(), mixed=(), operators=operators)
    built = estimator.build_estimator(model_shape.load_shape("opt-13b"), cluster, folder=tmp_path)
    assert known(built.estimate(H100, 2, 1)).confidence.source.startswith("operators by vllm")
    assert known(built.estimate(H100, 4, 1)).confidence.kind is LatencySource.KERNELS


def test_weights_of_8_bits_go_to_the_roofline_where_no_kernel_of_them_was_measured() -> None:
    shape = model_shape.from_config(
        "opt-13b-int8",
        {
            "model_type": "opt",
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "ffn_dim": 20480,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        },
    )
    found = known(estimator.build_estimator(shape, CLUSTER).estimate(A100, 1, 1))
    assert found.confidence.kind is LatencySource.ROOFLINE


def test_a_power_cap_slows_published_prompts_as_published() -> None:
    free = known(of("llama-2-70b").estimate(H100, 8, 1))
    capped = known(of("llama-2-70b", choices=[CAPPED]).estimate(H100, 8, 1))
    assert capped.timing.predict_prefill_ms([1500]) == pytest.approx(
        1.3 * free.timing.predict_prefill_ms([1500])
    )
    assert capped.timing.predict_decode_ms(8, 4000) == free.timing.predict_decode_ms(8, 4000)
    assert capped.power_watts == 350 * 8
    assert capped.peak_flops == pytest.approx(free.peak_flops)


def test_the_peak_is_that_of_all_gpus_in_the_precision_of_the_products() -> None:
    built = of("llama-3.1-8b")
    assert known(built.estimate(A100, 2, 2)).peak_flops == pytest.approx(4 * 312e12)


@pytest.mark.parametrize(
    ("name", "gpu", "tensor", "stages", "reason"),
    [
        ("opt-13b", "B200", 1, 1, "there is no B200; there is A100-SXM-80GB, H100-SXM-80GB"),
        ("opt-13b", A100, 16, 1, "16 tensor parallel GPUs exceed the 8 of a node"),
        ("opt-13b", A100, 3, 1, "40 attention heads cannot be shared by 3 GPUs"),
        ("opt-13b", A100, 1, 41, "40 layers cannot fill 41 pipeline stages"),
        ("opt-66b", A100, 1, 1, "does not fit: 122.4 GiB of weights"),
    ],
)
def test_no_answer_has_its_reason(
    name: str, gpu: str, tensor: int, stages: int, reason: str
) -> None:
    built = of(name)
    assert built.estimate(gpu, tensor, stages) is None
    assert reason in str(built.explain_unsupported(gpu, tensor, stages))


@pytest.mark.parametrize(
    "name", ["opt-66b", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "bloom"]
)
def test_every_answer_is_usable(name: str) -> None:
    built = of(name, max_model_len=1024)
    for gpu in (A100, H100):
        for tensor in (1, 2, 4, 8):
            for stages in (1, 2, 3, 4):
                found = built.estimate(gpu, tensor, stages)
                if found is None:
                    assert built.explain_unsupported(gpu, tensor, stages)
                    continue
                assert found.timing.stages == stages
                assert found.kv_capacity_tokens > 0
                assert 1 <= found.prefill_saturation_tokens <= found.max_model_len == 1024
                assert (
                    0
                    < found.timing.predict_prefill_ms([100])
                    < found.timing.predict_prefill_ms([1000])
                )
                assert found.timing.predict_decode_ms(1, 100) > 0
                assert min(found.power_watts, found.cost_per_hour, found.flops_per_token) > 0


def test_results_are_cached() -> None:
    built = of("llama-3.1-8b")
    assert built.estimate(H100, 2, 1) is built.estimate(H100, 2, 1)


def test_unusable_profiles_are_reported_with_their_place_in_the_cluster_file(
    tmp_path: Path,
) -> None:
    cluster = CLUSTER.model_copy(update={"profiles": ["none.yaml"]})
    with pytest.raises(ManifestError, match=r"profiles\[0\]: .*none\.yaml: No such file"):
        estimator.build_estimator(model_shape.load_shape("opt-13b"), cluster, folder=tmp_path)


def test_ranks_share_experts_and_have_the_memory_of_one_engine_each() -> None:
    built = of("deepseek-v3")
    few, many = (known(built.estimate(H100, 1, 1, ranks, expert=True)) for ranks in (16, 32))
    assert few.confidence.kind is LatencySource.KERNELS
    assert few.kv_capacity_tokens < many.kv_capacity_tokens
    assert many.power_watts == 2 * few.power_watts


@pytest.mark.parametrize(
    ("model", "sizes", "reason"),
    [
        ("deepseek-v3", (1, 2, 8), "pipeline stages are not predicted with data"),
        ("deepseek-v3", (1, 1, 8), "does not fit"),
        ("deepseek-v3", (1, 1, 320), "256 experts do not suffice for 320 GPUs"),
        ("opt-13b", (1, 1, 2), "it has no experts"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_a_reason(
    model: str, sizes: tuple[int, int, int], reason: str
) -> None:
    built = of(model)
    assert built.estimate(H100, *sizes, expert=True) is None
    assert reason in str(built.explain_unsupported(H100, *sizes, expert=True))


def test_a_gpu_without_tables_prices_ranks_by_the_roofline() -> None:
    cluster = Cluster.model_validate({"nodes": [{"count": 4, "gpu": "H800"}]})
    built = estimator.build_estimator(model_shape.load_shape("deepseek-v3"), cluster)
    found = known(built.estimate("H800-SXM-80GB", 1, 1, 32, expert=True))
    sliced = known(built.estimate("H800-SXM-80GB", 1, 1, 32))
    assert found.confidence.kind is LatencySource.ROOFLINE
    assert "all-to-all by allgather_reducescatter" in found.confidence.source
    assert sliced.confidence.source.endswith("sliced experts")
    assert found.kv_capacity_tokens == sliced.kv_capacity_tokens
