"""`cleave validate` of several manifests, folders and standard input."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cleave.cli.main import app

from tests.cli.conftest import SMALLEST

FAULTY = SMALLEST.replace("chat", "code").replace("ttftMs: 400", "ttftMs: -4")
SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "deploy"
    folder.mkdir()
    (folder / "code.yml").write_text(FAULTY)
    (folder / "chat.yaml").write_text(SMALLEST)
    (folder / "cluster.yaml").write_text("nodes: [{gpu: H100-SXM-80GB}]\n")
    (folder / "notes.txt").write_text("kind: LLMDeployment\n")
    return folder


def test_a_fault_in_any_of_several_files_is_found(cli: CliRunner, folder: Path) -> None:
    files = [folder / "code.yml", folder / "chat.yaml"]
    result = cli.invoke(app, ["validate", *(word for file in files for word in ("-f", str(file)))])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {files[0]}: spec.slo.ttftMs: must be > 0")
    assert result.stdout == f"{files[1]}: LLMDeployment chat is valid\n"


def test_a_folder_is_read_as_kubectl_does(cli: CliRunner, folder: Path) -> None:
    result = cli.invoke(app, ["validate", "-f", str(folder)])
    assert result.exit_code == 2
    assert result.stdout == f"{folder}/chat.yaml: LLMDeployment chat is valid\n"
    noted, fault = sorted(result.stderr.splitlines(), reverse=True)
    assert noted == f"note: {folder}/cluster.yaml: holds no LLMDeployment"
    assert fault.startswith(f"error: {folder}/code.yml: spec.slo.ttftMs: ")
    (folder / "code.yml").unlink()
    assert cli.invoke(app, ["validate", "-f", str(folder)]).exit_code == 0


def test_a_folder_without_manifests_is_an_error(cli: CliRunner, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = cli.invoke(app, ["validate", "-f", str(empty)])
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {empty}: has no file *.yaml, *.yml, *.json\n",
    )


def test_other_objects_beside_deployments_are_skipped(cli: CliRunner) -> None:
    text = "---\n".join((SERVICE, SMALLEST, FAULTY.replace("-4", "0.4")))
    result = cli.invoke(app, ["validate", "-f", "-"], input=text)
    assert result.exit_code == 0
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["chat", "code"]
    assert result.stderr.startswith("warning: code: spec.slo.ttftMs: 0.4 is 0.4 milliseconds")


def test_a_file_that_is_named_must_hold_a_deployment(cli: CliRunner, tmp_path: Path) -> None:
    file, misspelled = tmp_path / "service.yaml", tmp_path / "chat.yaml"
    file.write_text(SERVICE)
    misspelled.write_text(SMALLEST.replace("cleave.dev", "clave.dev"))
    for each in (file, misspelled):
        result = cli.invoke(app, ["validate", "-f", str(each)])
        assert result.exit_code == 2
        assert "error: apiVersion: must be cleave.dev/v1alpha1" in result.stderr
