"""What stands between `helm uninstall` and deployments that are left."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cleave.controller import uninstall_check
from cleave.controller.install_check import CheckError
from cleave.controller.uninstall_check import explain, find_left
from cleave.rpc.kube_api import AccessError, ApiServerAccess

ROLLBACK = ["--rollback", "helm rollback r 3"]
LISTS = "/apis/cleave.dev/v1alpha1{}/llmdeployments"


class FakeApiServer(HTTPServer):
    """Lists deployments by path."""

    lists: dict[str, tuple[int, dict]]


class _Handler(BaseHTTPRequestHandler):
    server: FakeApiServer

    def do_GET(self) -> None:
        status, body = self.server.lists[self.path]
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def list_of(namespace: str, *names: str) -> tuple[int, dict]:
    return 200, {"items": [{"metadata": {"namespace": namespace, "name": n}} for n in names]}


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer(("127.0.0.1", 0), _Handler) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


@pytest.fixture
def access(server: FakeApiServer) -> ApiServerAccess:
    return ApiServerAccess(f"http://127.0.0.1:{server.server_port}", "secret")


def test_it_looks_where_the_operator_looks(server, access) -> None:
    server.lists = {
        LISTS.format(""): list_of("c", "z"),
        LISTS.format("/namespaces/a"): list_of("a", "y", "x"),
        LISTS.format("/namespaces/b"): list_of("b"),
    }
    assert find_left(access, []) == ["c/z"]
    assert find_left(access, ["a", "b"]) == ["a/x", "a/y"]


def test_without_crds_none_is_left_and_without_permission_it_is_not_known(server, access) -> None:
    server.lists = {LISTS.format(""): (404, {})}
    assert find_left(access, []) == []
    server.lists = {LISTS.format(""): (403, {"message": "forbidden"})}
    with pytest.raises(CheckError, match="forbidden"):
        find_left(access, [])


def test_the_message_names_what_is_left_and_the_ways_on() -> None:
    said = explain([f"a/{number}" for number in range(12)], ["a"], "helm rollback r 3")
    assert "12 LLMDeployments are left (a/0, a/1," in said
    assert "a/11" not in said
    assert "kubectl delete llmdeployments --all -n a" in said
    assert "--no-hooks" in said
    assert said.endswith("helm rollback r 3")
    assert "--all-namespaces" in explain(["a/x"], [], "")


def test_exit_codes_are_helms_answer(server, access, monkeypatch, capsys) -> None:
    monkeypatch.setattr(uninstall_check, "find_access", lambda: access)
    server.lists = {LISTS.format(""): list_of("c", "z")}
    assert uninstall_check.main(ROLLBACK) == 1
    assert "c/z" in capsys.readouterr().err
    server.lists = {LISTS.format(""): list_of("c")}
    assert uninstall_check.main(ROLLBACK) == 0

    def refuse() -> ApiServerAccess:
        raise AccessError("no service account")

    monkeypatch.setattr(uninstall_check, "find_access", refuse)
    assert uninstall_check.main(ROLLBACK) == 2
