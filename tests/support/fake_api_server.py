"""An API server that knows EndpointSlices and tokens: lists them, and streams what changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


def build_slice(
    name: str, *hosts: str, kind: str = "IPv4", version: int = 0, **thresholds: int
) -> dict:
    """An EndpointSlice; `thresholds`: labels, as `short_prompt_tokens=256`."""
    named = {f"cleave.dev/{key.replace('_', '-')}": str(n) for key, n in thresholds.items()}
    return {
        "metadata": {"name": name, "resourceVersion": str(version), "labels": named},
        "addressType": kind,
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": n % 2 == 0},
                "targetRef": {"kind": "Pod", "name": f"pod-{host}", "uid": f"uid-{host}"},
            }
            for n, host in enumerate(hosts)
        ],
    }


class FakeApiServer:
    """Answers as kube-apiserver does, over plain HTTP."""

    def __init__(self) -> None:
        self.slices: dict[str, dict] = {}
        self.status = 200
        """Of every answer; other than 200 it refuses."""
        self.lists = 0
        self.watches = 0
        self.queries: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.bodies: list[dict] = []
        """Of all POSTs."""
        self.token: dict = {}
        """The status of each TokenRequest."""
        self.headers: list[str] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._watchers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in tuple(self._connections):
            writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def put(self, item: dict, kind: str = "MODIFIED") -> None:
        """Store a slice and notify watchers."""
        self.slices[item["metadata"]["name"]] = item
        self.send({"type": kind, "object": item})

    def delete(self, name: str) -> None:
        self.send({"type": "DELETED", "object": self.slices.pop(name)})

    def send(self, event: object) -> None:
        """Send watchers an event, in two pieces that fit no border."""
        line = json.dumps(event).encode() + b"\n"
        for piece in (line[:7], line[7:]):
            for writer in self._watchers:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_watches(self) -> None:
        """As at their time-out."""
        for writer in self._watchers:
            writer.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """As when the server is killed."""
        for writer in tuple(self._connections):
            writer.transport.abort()

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = urlsplit(head.split()[1])
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            self.headers.append(head)
            self.paths.append(target.path)
            self.queries.append(query)
            if head.startswith("POST"):
                size = int(head.lower().partition("content-length: ")[2].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
                query["post"] = "1"
            self._answer(query, writer)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._watchers.discard(writer)
            self._connections.discard(writer)
            writer.close()

    def _answer(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            self._send(writer, self.status, {"kind": "Status", "message": "not for you"})
        elif "post" in query:
            self._send(writer, 201, {"status": self.token})
        elif "watch" in query:
            self.watches += 1
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._watchers.add(writer)
        else:
            self.lists += 1
            page = {"metadata": {"resourceVersion": "7"}, "items": list(self.slices.values())}
            self._send(writer, 200, page)

    def _send(self, writer: asyncio.StreamWriter, status: int, page: dict) -> None:
        body = json.dumps(page).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


@asynccontextmanager
async def serve_slices(kubeconfig: Path) -> AsyncIterator[FakeApiServer]:
    """An API server, to which the written file leads."""
    fake = FakeApiServer()
    await fake.start()
    _write_kubeconfig(kubeconfig, fake.port)
    yield fake
    await fake.stop()


def _write_kubeconfig(path: Path, port: int) -> None:
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    path.write_text(json.dumps(document))
