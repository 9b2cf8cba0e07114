"""Keys that change while the gateway runs."""

import os
from pathlib import Path

import pytest

from cleave.gateway import server
from cleave.gateway.admission.api_keys import ApiKeysError, ApiKeysFile, read_api_keys


def mount(folder: Path, version: str, text: str) -> Path:
    """As kubelet updates a mounted Secret: a new folder, and a link that is swapped."""
    (folder / version).mkdir(parents=True)
    (folder / version / "keys").write_text(text)
    (folder / "..new").symlink_to(version)
    os.rename(folder / "..new", folder / "..data")
    if not (folder / "keys").is_symlink():
        (folder / "keys").symlink_to("..data/keys")
    return folder / "keys"


def accepts(file: ApiKeysFile, key: str) -> bool:
    return file.keys.accepts(f"Bearer {key}".encode())


def test_a_replaced_secret_is_read_again(tmp_path: Path) -> None:
    file = ApiKeysFile(mount(tmp_path, "v1", "first-of-two-keys\n"))
    assert (accepts(file, "first-of-two-keys"), accepts(file, "second-of-two-keys")) == (
        True,
        False,
    )
    mount(tmp_path, "v2", "secnd-of-two-keys\n")
    file.refresh()
    assert (accepts(file, "first-of-two-keys"), accepts(file, "secnd-of-two-keys")) == (False, True)


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_emptied_secret_opens_nothing_and_closes_nothing(tmp_path: Path, text: str) -> None:
    file = ApiKeysFile(mount(tmp_path, "v1", "first-of-two-keys\n"))
    mount(tmp_path, "v2", text)
    file.refresh()
    assert (accepts(file, "first-of-two-keys"), accepts(file, "")) == (True, False)


def test_a_secret_that_is_gone_leaves_its_keys(tmp_path: Path) -> None:
    path = mount(tmp_path, "v1", "first-of-two-keys\n")
    file = ApiKeysFile(path)
    path.unlink()
    file.refresh()
    assert accepts(file, "first-of-two-keys")
    with pytest.raises(ApiKeysError):
        read_api_keys(path)


def test_without_a_key_file_every_client_is_served() -> None:
    file = ApiKeysFile(None)
    file.refresh()
    assert file.keys.accepts(None)


async def test_a_running_gateway_takes_new_keys(make_stage, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server, "FILE_CHECK_INTERVAL_S", 0.02)
    path = mount(tmp_path, "v1", "first-of-two-keys\n")
    stage = await make_stage({"x": "mixed"}, api_keys=path)
    mount(tmp_path, "v2", "second-of-two-keys\n")
    await stage.until(
        lambda: stage.context.api_keys.accepts(b"Bearer second-of-two-keys"), "new keys"
    )
    assert (
        await stage.ask(None, "/v1/models", Authorization="Bearer first-of-two-keys")
    ).status == 401
    assert (
        await stage.ask(None, "/v1/models", Authorization="Bearer second-of-two-keys")
    ).status == 200


async def test_keys_that_should_have_changed_show_in_a_metric(
    make_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(server, "FILE_CHECK_INTERVAL_S", 0.02)
    path = mount(tmp_path, "v1", "first-of-two-keys\n")
    stage = await make_stage({"x": "mixed"}, api_keys=path)
    metrics = stage.context.metrics
    mount(tmp_path, "v2", "short\n")
    await stage.until(lambda: metrics.keys_stale == 1, "the first key is still valid")
    page = (await stage.ask(None, "/metrics", Authorization="Bearer first-of-two-keys")).body
    assert b"cleave_gateway_keys_stale 1.0" in page
    mount(tmp_path, "v3", "second-of-two-keys\n")
    await stage.until(lambda: metrics.keys_stale == 0, "the file can be read again")
