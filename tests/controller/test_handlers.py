"""kopf's watches against an API server that answers with errors, as one does while it starts."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import kopf
import pytest

from cleave.controller import handlers
from cleave.controller.cluster.client import KINDS, ApiResource
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.resync import WATCHED_KINDS
from cleave.manifests.labels import Manifest

from tests.support.fake_cluster import chat

WAIT_S = 60
SERVED = {
    **{kind: KINDS[kind] for kind in WATCHED_KINDS},
    # kopf reads about these, whether it watches them or not.
    "Namespace": ApiResource("v1", "namespaces", is_namespaced=False),
    "CustomResourceDefinition": ApiResource(
        "apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False
    ),
}


class ApiServer(ThreadingHTTPServer):
    """Discovery, empty lists, and watches of which that of LLMDeployments reports one event."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 0
        """What requests are answered with; 0: what they ask for."""
        self.refused: set[str] = set()
        """Paths that were answered with an error."""
        self.tokens: set[str] = set()
        self.event: Manifest = {"type": "ADDED", "object": chat()}
        self.watched: set[str] = set()
        self.disconnected = threading.Event()

    def serve_error(self, status: int) -> None:
        """End all watches, and answer every request with an error from now on."""
        self.status = status
        self.disconnected.set()

    def recover(self) -> None:
        """Answer again."""
        self.disconnected = threading.Event()
        self.status = 0


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.status:
            self.server.refused.add(path)
            self.answer({"kind": "Status", "message": "starting"}, self.server.status)
        elif "watch=true" in query:
            self.watch(path)
        else:
            self.answer(discover(path) or {"metadata": {"resourceVersion": "1"}, "items": []})

    def answer(self, body: Manifest, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def watch(self, path: str) -> None:
        disconnected = self.server.disconnected
        self.send_response(200)
        self.end_headers()
        if path.endswith("/llmdeployments"):
            self.wfile.write(json.dumps(self.server.event).encode() + b"\n")
        self.server.watched.add(path)
        disconnected.wait()
        self.server.watched.discard(path)


def discover(path: str) -> Manifest | None:
    """Return the answer to a request for what the API server has; None: it asks for objects."""
    groups = {api.version for api in SERVED.values()} - {"v1"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = [{"version": each.split("/")[1], "groupVersion": each} for each in groups]
        names = [each.split("/")[0] for each in groups]
        return {
            "groups": [
                {"name": name, "preferredVersion": version, "versions": [version]}
                for name, version in zip(names, versions, strict=True)
            ]
        }
    if path.removeprefix("/apis/") not in groups and path != "/api/v1":
        return None
    about = {"singularName": "", "verbs": ["get", "list", "watch"]}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {
        "resources": [
            {"name": api.plural, "kind": kind, "namespaced": api.is_namespaced, **about}
            for kind, api in SERVED.items()
            if api.version == version
        ]
    }


class Recorder:
    """Stands in for the controller."""

    def __init__(self) -> None:
        self.seen = 0

    def on_change(self, manifest: Manifest) -> None:
        assert manifest["metadata"]["name"] == "chat"
        self.seen += 1


@pytest.fixture
def api_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    logins = iter(range(1_000_000))

    def log_in(**_: object) -> kopf.ConnectionInfo:
        host, port = server.server_address[:2]
        return kopf.ConnectionInfo(server=f"http://{host}:{port}", token=f"token-{next(logins)}")

    monkeypatch.setattr(kopf, "login_via_client", log_in)
    yield server
    server.disconnected.set()
    server.shutdown()
    server.server_close()


def watch(recorder: Recorder) -> asyncio.Task[None]:
    coroutine: Any = handlers.run_watches(recorder, OperatorMetrics(), ())  # type: ignore[arg-type]
    return asyncio.create_task(coroutine)


async def wait_until(condition: Any, *tasks: asyncio.Task[None]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        for task in tasks:
            assert not task.done(), task
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
async def test_watches_survive_an_api_server_that_answers_with_errors(
    api_server: ApiServer, status: int
) -> None:
    recorder = Recorder()
    watches = watch(recorder)
    await wait_until(lambda: len(api_server.watched) == len(WATCHED_KINDS), watches)
    await wait_until(lambda: recorder.seen == 1, watches)
    api_server.serve_error(status)
    await wait_until(lambda: len(api_server.refused) == len(WATCHED_KINDS), watches)
    assert not api_server.watched
    api_server.recover()
    await wait_until(lambda: len(api_server.watched) == len(WATCHED_KINDS), watches)
    await wait_until(lambda: recorder.seen >= 2, watches)
    assert (len(api_server.tokens) > 1) == (status == 401)
    watches.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watches


async def test_watches_start_when_the_api_server_does(api_server: ApiServer) -> None:
    recorder = Recorder()
    api_server.serve_error(403)
    watches = watch(recorder)
    await wait_until(lambda: api_server.refused, watches)
    api_server.recover()
    await wait_until(lambda: recorder.seen == 1, watches)
    watches.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watches


async def test_a_failure_of_the_watches_is_reported_in_bounded_time(api_server: ApiServer) -> None:
    """An error inside a stream ends kopf, which would leave watches that nothing reads."""
    api_server.event = {"type": "ERROR", "object": {"code": 500, "message": "internal"}}
    watches = watch(Recorder())
    done, _ = await asyncio.wait([watches], timeout=WAIT_S)
    assert done
    assert watches.exception() is not None
    (operator,) = [task for task in asyncio.all_tasks() if task.get_name() == "kopf"]
    # What kopf has left would outlive the test: it takes a cancellation that comes alone.
    while left := [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher")]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)
    await asyncio.wait([operator], timeout=WAIT_S)
    assert operator.exception() is not None
