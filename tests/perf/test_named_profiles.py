"""The published fits as timings."""

import subprocess
import sys
from pathlib import Path

import pytest

from cleave.perf import named_profiles
from cleave.perf.profile import operator_fit, profile
from cleave.perf.published import distserve
from cleave.perf.timing import PromptChunk

from tests.support import measured_profiles

NAME = "distserve/opt-13b/tp1"


@pytest.mark.parametrize("name", named_profiles.list_names())
def test_every_profile_grows_with_the_prompt_the_context_and_the_batch(name: str) -> None:
    model = named_profiles.load_profile(name).timing
    assert (
        0
        < model.predict_prefill_ms([128])
        < model.predict_prefill_ms([1024])
        < model.predict_prefill_ms([1024, 1024])
    )
    assert (
        0
        < model.predict_decode_ms(1, 100)
        < model.predict_decode_ms(1, 10_000)
        < model.predict_decode_ms(50, 10_000)
    )


def test_prefill_is_the_published_fit() -> None:
    model = named_profiles.load_profile(NAME).timing
    expected = 18.10254647486372 + 0.1019122572698738 * 700 + 7.122264314252114e-06 * 290_000
    assert model.predict_prefill_ms([500, 200]) == pytest.approx(expected)


def test_decode_changes_its_fit_at_a_batch_of_95() -> None:
    model = named_profiles.load_profile(NAME).timing
    below = 19.934702624895458 + 0.0006269356524350583 * 9400 + 0.03850697740828398 * 94
    above = 7.1661889468253595 + 0.0005798000403396046 * 9500 + 0.15831096191764046 * 95
    assert model.predict_decode_ms(94, 9400) == pytest.approx(below)
    assert model.predict_decode_ms(95, 9500) == pytest.approx(above)


def test_a_pass_with_one_part_empty_is_the_other_part() -> None:
    model = named_profiles.load_profile(NAME).timing
    assert model.predict_iteration_ms([PromptChunk(0, 300)], 0, 0) == model.predict_prefill_ms(
        [300]
    )
    assert model.predict_iteration_ms([], 7, 900) == model.predict_decode_ms(7, 900)
    assert model.predict_iteration_ms([], 0, 0) == 0


def test_the_chunks_of_a_prompt_cost_the_prompt_and_one_fixed_part_each() -> None:
    model = named_profiles.load_profile(NAME).timing
    chunks = [PromptChunk(0, 100), PromptChunk(100, 350), PromptChunk(350, 1000)]
    whole = model.predict_prefill_ms([1000])
    assert sum(model.predict_iteration_ms([chunk], 0, 0) for chunk in chunks) == pytest.approx(
        whole + 2 * model.prompt_ms[0]
    )


def test_no_requests_take_no_time() -> None:
    model = named_profiles.load_profile(NAME).timing
    assert model.predict_prefill_ms([]) == 0
    assert model.predict_decode_ms(0, 0) == 0


def test_an_unknown_profile_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(named_profiles.UnknownProfileError, match="vllm/opt-66b/tp8"):
        named_profiles.load_profile("distserve/opt-175b/tp1")


def test_a_file_is_loaded_like_a_name(tmp_path: Path) -> None:
    path = tmp_path / "opt.yaml"
    profile.write_profile(measured_profiles.from_fit(), path)
    loaded = named_profiles.load_profile(str(path))
    assert (loaded.name, loaded.model) == (str(path), "facebook/opt-13b")
    assert loaded.kv_capacity_tokens == 60_000
    truth = named_profiles.load_profile(NAME).timing
    assert loaded.timing.predict_prefill_ms([512]) == pytest.approx(
        truth.predict_prefill_ms([512]), rel=1e-3
    )


def test_a_file_of_operators_is_put_together(tmp_path: Path) -> None:
    path = tmp_path / "operators.json"
    alone = measured_profiles.from_fit(
        prefill=(), decode=(), mixed=(), operators=measured_profiles.operators()
    )
    profile.write_profile(alone, path)
    loaded = named_profiles.load_profile(str(path)).timing
    assert loaded == operator_fit.to_timing(measured_profiles.operators(), 1)


def test_a_file_that_is_none_or_without_kv_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "opt.yaml"
    with pytest.raises(named_profiles.UnknownProfileError, match="No such file"):
        named_profiles.load_profile(str(path))
    profile.write_profile(measured_profiles.from_fit(kv_capacity_tokens=None), path)
    with pytest.raises(named_profiles.UnknownProfileError, match="kvCapacityTokens: is missing"):
        named_profiles.load_profile(str(path))


def test_a_profile_knows_how_much_kv_its_instance_holds() -> None:
    assert named_profiles.load_profile(NAME).kv_capacity_tokens == 66_144
    assert named_profiles.load_profile("vllm/opt-66b/tp4").kv_capacity_tokens == 78_496
    assert distserve.KV_CAPACITY_TOKENS["opt-175b"][8, 8] == 992_400


def test_the_package_imports_neither_numpy_nor_pydantic() -> None:
    code = (
        "import sys, cleave.perf.named_profiles, cleave.perf.model.model_shape;"
        "sys.exit(bool({'numpy', 'pydantic', 'grpc', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
