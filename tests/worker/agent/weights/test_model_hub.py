"""The commit of a branch: from a hub, else from what was downloaded."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cleave_worker.agent.weights import model_hub

OLD, NEW = "a" * 40, "b" * 40


@dataclass
class Hub:
    """What a hub answers, by path, and what it was sent."""

    commits: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # The library reads other paths, too.
            state.paths += [self.path] if "/models/" in self.path else []
            commit = state.commits.get(self.path)
            body = json.dumps({"id": "org/m", "sha": commit, "siblings": []}).encode()
            self.send_response(200 if commit else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Keep the output of tests short."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield state
        server.shutdown()
        thread.join()


def write_reference(cache: Path, name: str, revision: str, commit: str) -> None:
    path = cache / f"models--{name.replace('/', '--')}" / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)


def test_a_branch_is_what_the_hub_says_before_what_was_downloaded(hub: Hub, tmp_path: Path) -> None:
    write_reference(tmp_path, "org/m", "main", OLD)
    hub.commits["/api/models/org/m/revision/main"] = NEW
    assert model_hub.find_commit("org/m", "main", tmp_path, offline=False) == NEW
    assert model_hub.find_commit("org/m", "main", tmp_path, offline=True) == OLD
    assert len(hub.paths) == 1


def test_a_hub_that_does_not_know_it_leaves_what_was_downloaded(hub: Hub, tmp_path: Path) -> None:
    assert model_hub.find_commit("org/m", "v1", tmp_path, offline=False) == ""
    write_reference(tmp_path, "org/m", "v1", OLD)
    assert model_hub.find_commit("org/m", "v1", tmp_path, offline=False) == OLD
    assert len(hub.paths) == 2


def test_a_hub_that_answers_something_else_is_not_believed(hub: Hub, tmp_path: Path) -> None:
    hub.commits["/api/models/org/m/revision/main"] = "../../x"
    assert model_hub.find_commit("org/m", "main", tmp_path, offline=False) == ""


def test_a_commit_cannot_move_so_nothing_is_read(hub: Hub, tmp_path: Path) -> None:
    assert model_hub.find_commit("org/m", OLD, tmp_path, offline=False) == OLD
    assert not hub.paths


def test_references_below_folders_are_found_and_no_other_files(tmp_path: Path) -> None:
    write_reference(tmp_path, "org/m", "refs/pr/1", OLD)
    write_reference(tmp_path, "gpt2", "main", NEW)
    (tmp_path / "secret").write_text(OLD)
    assert model_hub.read_cached("org/m", "refs/pr/1", tmp_path) == OLD
    assert model_hub.read_cached("gpt2", "main", tmp_path) == NEW
    assert model_hub.read_cached("org/m", "../../../secret", tmp_path) == ""
    assert model_hub.read_cached("../org/m", "main", tmp_path) == ""
    assert model_hub.read_cached("org/m", "refs", tmp_path) == ""
    write_reference(tmp_path, "org/m", "half", OLD[:20])
    assert model_hub.read_cached("org/m", "half", tmp_path) == ""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_library_has_it(env: dict[str, str], expected: str) -> None:
    assert str(model_hub.find_cache(env)) == expected


@pytest.mark.parametrize(
    ("env", "offline"),
    [
        ({}, False),
        ({"HF_HUB_OFFLINE": "0"}, False),
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"TRANSFORMERS_OFFLINE": "yes"}, True),
    ],
)
def test_the_environment_may_forbid_the_hub(env: dict[str, str], offline: bool) -> None:
    assert model_hub.is_offline(env) is offline


@pytest.mark.parametrize("name", ["/m", "s3://bucket/m", "a/b/c", "", "org/m:Q4_K_M", "a/../b"])
def test_what_is_no_repository_is_known_as_such(name: str) -> None:
    assert not model_hub.is_repository(name)
