"""The name of a model's folder for vLLM's NixlConnector."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.weights import model_link
from cleave_worker.agent.weights.loaded_weights import Weights
from cleave_worker.agent.weights.model_link import link_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_link, "FOLDER", tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def vllm(config_of: Callable[..., AgentConfig], folder: Path) -> AgentConfig:
    return config_of(engine="vllm", model=str(folder))


def test_other_weights_of_one_folder_have_another_name(vllm: AgentConfig, folder: Path) -> None:
    one, again, other = (link_model(vllm, Weights(each)) for each in ("a1", "a1", "b2"))
    assert one == again != other
    assert Path(one).name.startswith("a1-")
    for link in (one, other):
        assert Path(link).resolve() == folder
        assert (Path(link) / "config.json").read_text() == "{}"


def test_two_folders_with_equal_content_share_no_link(
    config_of: Callable[..., AgentConfig], vllm: AgentConfig, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    other = config_of(engine="vllm", model=str(copy))
    assert link_model(vllm, Weights("a1")) != link_model(other, Weights("a1"))


def test_a_link_that_leads_elsewhere_is_replaced(vllm: AgentConfig, folder: Path) -> None:
    link = Path(link_model(vllm, Weights("a1")))
    link.unlink()
    link.symlink_to("/nowhere")
    assert Path(link_model(vllm, Weights("a1"))).resolve() == folder


@pytest.mark.parametrize(
    "changes",
    [{"engine": "emulated"}, {"connector": "cleave"}, {"model": "org/m"}, {"model": "/none"}],
)
def test_where_nothing_compares_the_name_it_stays(
    config_of: Callable[..., AgentConfig], folder: Path, changes: dict[str, str]
) -> None:
    config = config_of(**{"engine": "vllm", "model": str(folder), **changes})
    assert link_model(config, Weights("a1")) == config.model


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
        ("--kv_transfer_config.kv_connector=LMCacheConnectorV1",),
    ],
)
def test_a_connector_that_arguments_name_gets_a_name_by_content(
    config_of: Callable[..., AgentConfig], folder: Path, arguments: tuple[str, ...]
) -> None:
    config = config_of(engine="vllm", model=str(folder), connector="cleave", engine_args=arguments)
    assert Path(link_model(config, Weights("a1"))).name.startswith("a1-")
    ours = ("--kv-transfer-config", '{"kv_connector_extra_config": {}}')
    config = config_of(engine="vllm", model=str(folder), connector="cleave", engine_args=ours)
    assert link_model(config, Weights("a1")) == str(folder)


def test_a_folder_that_others_can_write_to_is_not_used(
    vllm: AgentConfig, folder: Path, tmp_path: Path
) -> None:
    own = Path(link_model(vllm, Weights("a1"))).parent
    own.chmod(0o777)
    assert link_model(vllm, Weights("b2")) == str(folder)
    own.chmod(0o700)
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    assert link_model(vllm, Weights("b2")) == str(folder)
