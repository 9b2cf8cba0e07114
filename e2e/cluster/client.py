"""What nodes ask of the API server: a few verbs and one way to follow a list.

Built on aiohttp alone, because dozens of pods change their status at once on two cores.
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

Manifest = dict[str, Any]

STRATEGIC = "application/strategic-merge-patch+json"
_REQUEST_TIMEOUT_S = 15
_WATCH_TIMEOUT_S = 300
_PAUSE_S = 0.5


class ApiError(RuntimeError):
    """The API server said no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Client:
    """Speaks to one API server as the user of a kubeconfig; an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        self.url: str = cluster["server"]
        self._trust = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(base64.b64decode(user["client-certificate-data"]))
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            self._trust.load_cert_chain(pair.name)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=64)
        self._session = aiohttp.ClientSession(self.url, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> Manifest:
        """The object or list at `path`. Raises ApiError."""
        return await self._ask("GET", path)

    async def read(self, path: str) -> str:
        """The text at `path`, such as metrics. Raises ApiError."""
        return await self._fetch("GET", path)

    async def post(self, path: str, body: Manifest) -> Manifest:
        """Create. Raises ApiError."""
        return await self._ask("POST", path, body)

    async def put(self, path: str, body: Manifest) -> Manifest:
        """Replace. Raises ApiError."""
        return await self._ask("PUT", path, body)

    async def patch(self, path: str, body: Manifest) -> Manifest:
        """Merge as the object's type says. Raises ApiError."""
        return await self._ask("PATCH", path, body, STRATEGIC)

    async def delete(self, path: str, body: Manifest) -> None:
        """Delete, with options. What is gone already is no error."""
        try:
            await self._ask("DELETE", path, body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def follow(
        self, path: str, listed: Callable[[list[Manifest]], None], seen: Callable[[Manifest], None]
    ) -> None:
        """Keep up with the list at `path` until cancelled.

        `listed` gets all objects at the start and after each gap, `seen` each event in between.
        """
        mark = "&" if "?" in path else "?"
        while True:
            try:
                found = await self.get(path)
                listed(found["items"])
                version = found["metadata"]["resourceVersion"]
                async for event in self._watch(f"{path}{mark}watch=1&resourceVersion={version}"):
                    if event["type"] == "ERROR":
                        break
                    seen(event)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                # The API server is away; what runs goes on.
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self, path: str) -> AsyncIterator[Manifest]:
        timeout = aiohttp.ClientTimeout(total=_WATCH_TIMEOUT_S, sock_connect=_REQUEST_TIMEOUT_S)
        async with self._session.get(path, timeout=timeout) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    async def _ask(
        self, verb: str, path: str, body: Manifest | None = None, kind: str = "application/json"
    ) -> Manifest:
        return json.loads(await self._fetch(verb, path, body, kind))  # type: ignore[no-any-return]

    async def _fetch(
        self, verb: str, path: str, body: Manifest | None = None, kind: str = "application/json"
    ) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": kind}
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        async with self._session.request(
            verb, path, data=data, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ApiError(answer.status, text)
            return text
