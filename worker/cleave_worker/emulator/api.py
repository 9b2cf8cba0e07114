"""vLLM's HTTP API of the emulated engine. Used by the command line and by tests.

What is hard: every token of every stream is written from the engine loop straight to the client's
socket, because waking one task per stream and token would cost more than all the rest.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from cleave_worker.emulator import answers, tokenizer
from cleave_worker.emulator.engine import Engine
from cleave_worker.emulator.faults import FaultError
from cleave_worker.emulator.metrics import Collector
from cleave_worker.emulator.protocol import ApiError, Call, bad_request, parse_call
from cleave_worker.emulator.sequence import Finish

VERSION = "0.32.0"
"""The vLLM whose behaviour this follows."""

_MAX_BODY = 64 << 20
_MAX_REQUESTS = 16384
"""Requests in the engine; vLLM would queue without end."""
_MAX_UNSENT = 4 << 20
"""A client that lags this many bytes behind is cut off."""
_WORDS = {token: tokenizer.decode(token).encode() for token in tokenizer.words()}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineError(Exception):
    """The engine gave a request up."""


class WholeAnswer:
    """Collects the tokens of a call that does not stream."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def push(self, token: int, finish: Finish | None) -> None:
        """One more token."""
        self.tokens.append(token)
        if finish and not self.finished.done():
            self.finished.set_result(finish)

    def fail(self, reason: str) -> None:
        """The engine gave up."""
        if not self.finished.done():
            self.finished.set_exception(EngineError(reason))


class Stream:
    """Writes each token as one server-sent event."""

    def __init__(
        self, encoder: answers.EventEncoder, transport: asyncio.Transport, drop: int | None
    ) -> None:
        self._encoder = encoder
        self._transport = transport
        self._drop = drop
        self._num_tokens = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, token: int, finish: Finish | None) -> None:
        """Write one more token."""
        if self._drop == self._num_tokens:
            self._transport.abort()
            return
        start = b"" if self._num_tokens else self._encoder.start()
        self._num_tokens += 1
        if finish:
            self._transport.write(start + self._encoder.end(token, finish, self._num_tokens))
            self._end()
            return
        self._transport.write(start + self._encoder.word(_WORDS[token]))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """End the stream with an error event, as vLLM does: the headers were sent long ago."""
        self._transport.write(answers.failure(_server_error(reason).body()))
        self._end()

    def _end(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class Api:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, fault_injection: bool = False) -> None:
        self._engine = engine
        self._model = engine.config.served_model_name
        self._created = int(time.time())
        self._registry = Collector(
            self._model, engine.metrics, engine.gauges, engine.cache_config
        ).registry()
        self._fault_injection = fault_injection

    def application(self) -> web.Application:
        """An aiohttp application; run it with handler_cancellation so that aborts are noticed."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_answer_errors])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        if self._fault_injection:
            app.router.add_post("/emulator/faults", self._set_faults)
            app.router.add_delete("/emulator/faults", self._clear_faults)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, chat: bool) -> web.StreamResponse:
        if self._engine.faults.refuse or not self._engine.alive:
            raise _unavailable("The engine takes no requests.")
        if self._engine.num_requests >= _MAX_REQUESTS:
            raise _unavailable(f"The engine has {_MAX_REQUESTS} requests.")
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise bad_request(f"The body is not JSON: {error}") from error
        limit = self._engine.config.max_model_len
        call = parse_call(body, chat, self._model, limit, request.headers)
        if call.stream:
            return await self._stream(request, call)
        return await self._whole(call)

    async def _whole(self, call: Call) -> web.Response:
        answer = WholeAnswer()
        sequence = self._engine.submit(call.request, answer)
        try:
            finish = await answer.finished
        except EngineError as error:
            raise _server_error(str(error)) from error
        finally:
            self._engine.abort(sequence)
        params = None
        if call.request.hold and self._engine.door:
            params = self._engine.door.params_of(sequence)
        body = answers.whole(call, self._model, answer.tokens, finish, params)
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        encoder = answers.EventEncoder(call, self._model)
        stream = Stream(encoder, transport, self._engine.faults.drop)
        sequence = self._engine.submit(call.request, stream)
        try:
            await stream.finished
        finally:
            self._engine.abort(sequence)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._engine.config.shape.name,
            "parent": None,
            "max_model_len": self._engine.config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "engine": "emulated"})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self._engine.faults.apply(await request.read())
        except FaultError as error:
            raise bad_request(str(error)) from error
        return web.json_response(self._engine.faults.describe())

    async def _clear_faults(self, _: web.Request) -> web.Response:
        self._engine.faults.clear()
        return web.json_response(self._engine.faults.describe())


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, "ServiceUnavailableError")


def _server_error(message: str) -> ApiError:
    return ApiError(500, message, "InternalServerError")
