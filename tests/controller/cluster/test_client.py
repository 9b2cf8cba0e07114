"""The way to the API server: what goes out, and what its answers come to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from cleave.controller.cluster import client
from cleave.controller.cluster.client import (
    KINDS,
    KubeApiError,
    KubeClient,
    connect,
    retry_transient,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STATUS = {"kind": "Status", "reason": "Forbidden", "message": "you may not"}


@asynccontextmanager
async def served(
    handler: Handler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubeClient]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    write_kubeconfig(folder / "config", f"http://{host}:{port}")
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    # The place of the default is read when the package is imported.
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config")
    )
    connection = await connect()
    try:
        yield connection
    finally:
        await connection.close()
        await runner.cleanup()


def write_kubeconfig(path: Path, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    path.write_text(yaml.safe_dump(config))


def test_paths_are_those_of_the_api() -> None:
    assert KINDS["Pod"].build_path("llm", "chat-1") == "/api/v1/namespaces/llm/pods/chat-1"
    assert KINDS["Pod"].build_path() == "/api/v1/pods"
    assert KINDS["Node"].build_path("ignored", "n1") == "/api/v1/nodes/n1"
    assert (
        KINDS["InstancePool"].build_path("llm", "a", "status")
        == "/apis/cleave.dev/v1alpha1/namespaces/llm/instancepools/a/status"
    )


async def test_proxies_of_the_environment_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"ok": 1})

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with served(answer, tmp_path, monkeypatch) as server:
        assert await server.request("GET", "/a") == {"ok": 1}


async def test_a_request_carries_token_query_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        seen.update(
            path=request.path_qs,
            token=request.headers["Authorization"],
            kind=request.headers["Content-Type"],
            body=await request.json(),
        )
        return web.json_response({"ok": 1})

    async with served(answer, tmp_path, monkeypatch) as server:
        said = await server.request(
            "PATCH", "/a", query={"force": "true"}, body={"b": 2}, content_type=client.APPLY_PATCH
        )
    assert said == {"ok": 1}
    assert seen == {
        "path": "/a?force=true",
        "token": "Bearer secret",
        "kind": "application/apply-patch+yaml",
        "body": {"b": 2},
    }


async def test_a_refusal_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response(STATUS, status=403, headers={"Retry-After": "7"})

    async with served(refuse, tmp_path, monkeypatch) as server:
        with pytest.raises(KubeApiError) as caught:
            await server.get("Pod", "llm", "a")
    error = caught.value
    assert (error.status, error.reason, error.message) == (403, "Forbidden", "you may not")
    assert error.retry_after_s == 7
    assert not error.is_transient


async def test_what_is_no_json_is_still_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(_request: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>bad gateway</html>")

    async with served(break_down, tmp_path, monkeypatch) as server:
        with pytest.raises(KubeApiError, match="502 Refused: <html>bad gateway</html>") as caught:
            await server.request("GET", "/a")
    assert caught.value.is_transient


async def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def be_silent(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with served(be_silent, tmp_path, monkeypatch) as server:
        with pytest.raises(KubeApiError) as caught:
            await server.request("GET", "/a", timeout_s=0.05)
    assert (caught.value.status, caught.value.is_transient) == (0, True)


async def test_a_kind_is_served_where_its_group_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path != "/apis/leaderworkerset.x-k8s.io/v1":
            return web.json_response(STATUS, status=404)
        return web.json_response({"resources": [{"name": "leaderworkersets"}]})

    async with served(answer, tmp_path, monkeypatch) as server:
        assert await server.serves("LeaderWorkerSet")
        assert not await server.serves("Deployment")


async def test_without_a_cluster_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubeApiError, match="set KUBECONFIG"):
        await connect()


class TestPersistence:
    """Calls that are tried again."""

    async def call(self, *answers: KubeApiError | dict[str, Any]) -> tuple[Any, list[float]]:
        waiting, pauses = list(answers), list[float]()

        async def ask() -> dict[str, Any]:
            answer = waiting.pop(0)
            if isinstance(answer, KubeApiError):
                raise answer
            return answer

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        return await retry_transient(ask, attempts=4, sleep=sleep), pauses

    async def test_it_waits_longer_each_time(self) -> None:
        away = KubeApiError(0, "Unreachable", "away")
        said, pauses = await self.call(away, away, away, {"ok": 1})
        assert said == {"ok": 1}
        assert [0.75 * p <= s <= 1.25 * p for p, s in zip((0.2, 0.4, 0.8), pauses, strict=True)]
        assert pauses == sorted(pauses)

    async def test_it_waits_for_the_requested_time_within_bounds(self) -> None:
        slow = KubeApiError(429, "TooManyRequests", "later", retry_after_s=3)
        slower = KubeApiError(429, "TooManyRequests", "later", retry_after_s=600)
        _, pauses = await self.call(slow, slower, {})
        assert 2.25 <= pauses[0] <= 3.75
        assert pauses[1] <= 12.5

    async def test_it_gives_up(self) -> None:
        away = KubeApiError(503, "Unavailable", "away")
        with pytest.raises(KubeApiError, match="503"):
            await self.call(*[away] * 9)

    async def test_it_does_not_repeat_what_was_refused(self) -> None:
        with pytest.raises(KubeApiError, match="422"):
            await self.call(KubeApiError(422, "Invalid", "no"), {})
