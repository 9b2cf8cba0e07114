"""vLLM's HTTP API of the emulated engine. Used by the command line and by tests.

Every token of every stream is written from the engine loop straight to the client's socket, because
waking one task per stream and token would cost more than all the rest.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as TypingSequence
from functools import partial
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from cleave.rpc import engine_key
from cleave_worker.access.engine_access import REFUSAL, EngineAccess
from cleave_worker.emulator import api_requests, responses, tokenizer
from cleave_worker.emulator.api_requests import ApiCall, EmulatorApiError, build_bad_request
from cleave_worker.emulator.engine import EmulatedEngine, TokenListener
from cleave_worker.emulator.faults import FaultError, end_if_poisoned
from cleave_worker.emulator.metrics import EngineMetricsCollector
from cleave_worker.emulator.sequence import FinishReason, Sequence

VERSION = "0.32.0"
"""The vLLM version whose behaviour is emulated."""

_FAULTS_PATH = "/emulator/faults"
_MAX_BODY = 64 << 20
_MAX_REQUESTS = 16384
"""Most requests in the engine; vLLM would queue without a limit."""
_MAX_UNSENT = 4 << 20
"""A client that is this many bytes behind is disconnected."""
_WORDS = {token: tokenizer.decode(token).encode() for token in tokenizer.list_word_ids()}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineError(Exception):
    """The engine ended a request with an error."""


class StopMatcher:
    """Searches for stop strings. Withholds text that could begin one, as vLLM does."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings
        self._max_partial = max(map(len, stop_strings), default=1) - 1
        self._text = ""

    def feed(self, text: str, last: bool) -> tuple[str, str | None]:
        """Return (text that may be sent, the stop string or None); `last`: no more text follows."""
        self._text += text
        for stop in self._stop_strings:
            if (index := self._text.find(stop)) >= 0:
                return self._text[:index], stop
        ready = len(self._text) - (0 if last else self._max_partial)
        out, self._text = self._text[: max(0, ready)], self._text[max(0, ready) :]
        return out, None


class BufferedChoice:
    """Collects the tokens of one choice of a call that does not stream."""

    def __init__(self, stops: StopMatcher) -> None:
        self._stop_matcher = stops
        self._tokens: list[int] = []
        self._text = ""
        loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[responses.CompletedChoice] = loop.create_future()

    def push(self, token: int, finish: FinishReason | None) -> None:
        """Add one token."""
        if self.finished.done():
            return
        self._tokens.append(token)
        text, stop = self._stop_matcher.feed(tokenizer.decode(token), finish is not None)
        self._text += text
        if stop is not None:
            finish = FinishReason.STOP
        if finish:
            choice = responses.CompletedChoice(self._tokens, self._text, finish, stop)
            self.finished.set_result(choice)

    def fail(self, reason: str) -> None:
        """End with an error of the engine."""
        if not self.finished.done():
            self.finished.set_exception(EngineError(reason))


class StreamedChoice:
    """Writes each token of one choice as one server-sent event."""

    def __init__(
        self,
        encoder: responses.EventEncoder,
        transport: asyncio.Transport,
        drop_after: int | None,
        stops: StopMatcher | None,
        interval: int = 1,
    ) -> None:
        """`stops`: None when every event contains one word and nothing else. `interval`: tokens of
        an event."""
        self._encoder = encoder
        self._transport = transport
        self._drop_after = drop_after
        self._stop_matcher = stops
        self._interval = interval
        self._held_ids: list[int] = []
        self._held_text = ""
        self._num_tokens = 0
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Number of tokens, once it has ended."""

    def push(self, token: int, finish: FinishReason | None) -> None:
        """Write one token."""
        if self.finished.done():
            return
        if self._drop_after == self._num_tokens:
            self._transport.abort()
            return
        start = b"" if self._num_tokens else self._encoder.encode_start()
        self._num_tokens += 1
        if finish or self._stop_matcher is not None:
            self._push_checked(start, token, finish)
            return
        self._transport.write(start + self._encoder.encode_word(token, _WORDS[token]))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """End the stream with an error event, as vLLM does, since the headers were sent before."""
        if not self.finished.done():
            error = _build_server_error(reason).build_body()
            self._transport.write(responses.encode_failure(error))
            self.finished.set_exception(EngineError(reason))

    def _push_checked(self, start: bytes, token: int, finish: FinishReason | None) -> None:
        text, stop = tokenizer.decode(token), None
        if self._stop_matcher is not None:
            text, stop = self._stop_matcher.feed(text, finish is not None)
        if stop is not None:
            finish = FinishReason.STOP
        self._held_ids.append(token)
        self._held_text += text
        # As vLLM's `stream_interval`: the first and the last token never wait.
        if not (finish or self._num_tokens == 1 or len(self._held_ids) >= self._interval):
            return
        ids, text, self._held_ids, self._held_text = self._held_ids, self._held_text, [], ""
        event = self._encoder.encode_tokens(text, ids, finish, stop, self._num_tokens)
        self._transport.write(start + event)
        if finish:
            self.finished.set_result(self._num_tokens)


class EmulatorApi:
    """HTTP handlers of one engine."""

    def __init__(
        self,
        engine: EmulatedEngine,
        fault_injection: bool = False,
        access: EngineAccess = EngineAccess(""),  # noqa: B008 - immutable
    ) -> None:
        self._engine = engine
        self._access = access
        self._models = [engine.config.served_model_name, *engine.config.adapters]
        self._created = int(time.time())
        self._registry = EngineMetricsCollector(
            self._models[0], engine.metrics, engine.collect_gauges, engine.cache_config
        ).build_registry()
        self._fault_injection = fault_injection

    def build_application(self) -> web.Application:
        """Return an aiohttp application; run it with handler_cancellation, to notice aborts."""
        app = web.Application(
            client_max_size=_MAX_BODY, middlewares=[self._check_key, _handle_api_errors]
        )
        app.router.add_post("/v1/completions", partial(self._generate, chat=False))
        app.router.add_post("/v1/chat/completions", partial(self._generate, chat=True))
        app.router.add_post("/tokenize", self._handle_tokenize)
        app.router.add_post("/detokenize", self._handle_detokenize)
        app.router.add_get("/v1/models", self._handle_models)
        if self._engine.config.loads_adapters:
            app.router.add_post("/v1/load_lora_adapter", self._handle_load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._handle_unload_adapter)
        app.router.add_get("/health", self._handle_health)
        app.router.add_get("/version", self._handle_version)
        app.router.add_get("/metrics", self._handle_metrics)
        if self._fault_injection:
            app.router.add_post(_FAULTS_PATH, self._handle_set_faults)
            app.router.add_delete(_FAULTS_PATH, self._handle_clear_faults)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        presented = request.headers.get(engine_key.HEADER, "")
        # With --fault-injection everyone may damage the engine, as docs/emulate.md says.
        is_fault = self._fault_injection and request.path == _FAULTS_PATH
        if is_fault or self._access.is_allowed(request.path, presented.encode(errors="replace")):
            return await handler(request)
        return web.Response(status=401, body=REFUSAL, content_type="application/json")

    async def _generate(self, request: web.Request, chat: bool) -> web.StreamResponse:
        if self._engine.faults.refuse or not self._engine.is_alive:
            raise _build_unavailable("The engine takes no requests.")
        if self._engine.num_requests >= _MAX_REQUESTS:
            raise _build_unavailable(f"The engine has {_MAX_REQUESTS} requests.")
        body = await _read_json(request)
        if self._fault_injection:
            end_if_poisoned(await request.read())
        limit = self._engine.config.max_model_len
        call = api_requests.parse_call(body, chat, self._models, limit, request.headers)
        if call.stream:
            return await self._respond_streaming(request, call)
        return await self._respond(call)

    async def _respond(self, call: ApiCall) -> web.Response:
        choices = [BufferedChoice(StopMatcher(call.stop)) for _ in call.requests]
        sequences = self._submit(call, choices)
        try:
            completed = await asyncio.gather(*(choice.finished for choice in choices))
        except EngineError as error:
            raise _build_server_error(str(error)) from error
        finally:
            self._abort(sequences)
        params = None
        if call.request.do_remote_decode and self._engine.side_channel:
            params = self._engine.side_channel.build_params(sequences[0])
            params = self._engine.faults.swap_handoffs(params)
        body = responses.encode_response(call, completed, params, self._count_cached(sequences[0]))
        return web.Response(body=body, content_type="application/json")

    async def _respond_streaming(self, request: web.Request, call: ApiCall) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        encoders = [responses.EventEncoder(call, index) for index in range(len(call.requests))]
        needs_text = bool(call.stop) or call.logprobs is not None
        needs_text = needs_text or call.interval > 1 or call.running_usage
        drop_after = self._engine.faults.drop
        streams = [
            StreamedChoice(
                encoder,
                transport,
                drop_after,
                StopMatcher(call.stop) if needs_text else None,
                call.interval,
            )
            for encoder in encoders
        ]
        sequences = self._submit(call, streams)
        with contextlib.suppress(EngineError):
            try:
                counts = await asyncio.gather(*(stream.finished for stream in streams))
                end = responses.encode_chunk(responses.DONE)
                cached = self._count_cached(sequences[0])
                transport.write(encoders[0].encode_usage(sum(counts), cached) + end)
            finally:
                self._abort(sequences)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    def _submit(self, call: ApiCall, listeners: TypingSequence[TokenListener]) -> list[Sequence]:
        pairs = zip(call.requests, listeners, strict=True)
        return [self._engine.submit(request, listener) for request, listener in pairs]

    def _count_cached(self, sequence: Sequence) -> int | None:
        """Cached prompt tokens, as usage shows them: those of the engine that computed the prompt,
        if a handoff says so. None: usage shows none."""
        if not self._engine.config.shows_prompt_details:
            return None
        handoff = sequence.request.handoff
        if handoff is not None and handoff.cached_tokens is not None:
            return handoff.cached_tokens
        return sequence.cached_tokens + sequence.pulled_tokens

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._engine.abort(sequence)

    async def _handle_tokenize(self, request: web.Request) -> web.Response:
        ids = api_requests.parse_prompt(await _read_json(request))
        limit = self._engine.config.max_model_len
        answer = {
            "count": len(ids),
            "max_model_len": limit,
            "tokens": list(ids),
            "token_strs": None,
        }
        return web.json_response(answer)

    async def _handle_detokenize(self, request: web.Request) -> web.Response:
        body = await _read_json(request)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise build_bad_request("tokens must be a list of token ids.", "tokens")
        return web.json_response({"prompt": "".join(map(tokenizer.decode, tokens))})

    async def _handle_models(self, _: web.Request) -> web.Response:
        config, (base, *adapters) = self._engine.config, self._models
        common = {"object": "model", "created": self._created, "owned_by": "vllm"}
        root, limit = config.shape.name, config.max_model_len
        cards = [{"id": base, **common, "root": root, "parent": None, "max_model_len": limit}]
        # vLLM gives no length for adapters.
        cards += [
            {"id": name, **common, "root": name, "parent": base, "max_model_len": None}
            for name in adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _handle_load_adapter(self, request: web.Request) -> web.Response:
        name, path = api_requests.parse_adapter(await _read_json(request))
        if name in self._models:
            fault = f"The lora adapter '{name}' has already been loaded."
            raise EmulatorApiError(400, fault, "InvalidUserInput")
        # vLLM reads this file.
        if path.startswith("/") and not (Path(path) / "adapter_config.json").is_file():
            fault = f"Loading lora {name} failed: No adapter found for {path}"
            raise EmulatorApiError(404, fault, "NotFoundError")
        self._models.append(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _handle_unload_adapter(self, request: web.Request) -> web.Response:
        name, _ = api_requests.parse_adapter(await _read_json(request))
        if name not in self._models[1:]:
            fault = f"The lora adapter '{name}' cannot be found."
            raise EmulatorApiError(404, fault, "NotFoundError")
        # Requests that run are finished.
        self._models.remove(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _handle_health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def _handle_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "engine": "emulated"})

    async def _handle_metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _handle_set_faults(self, request: web.Request) -> web.Response:
        try:
            self._engine.faults.apply(await request.read())
        except FaultError as error:
            raise build_bad_request(str(error)) from error
        return web.json_response(self._engine.faults.describe())

    async def _handle_clear_faults(self, _: web.Request) -> web.Response:
        self._engine.faults.clear()
        return web.json_response(self._engine.faults.describe())


async def _read_json(request: web.Request) -> object:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise build_bad_request(f"The body is not JSON: {error}") from error


@web.middleware
async def _handle_api_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EmulatorApiError as error:
        return web.json_response(error.build_body(), status=error.status)


def _build_unavailable(message: str) -> EmulatorApiError:
    return EmulatorApiError(503, message, "ServiceUnavailableError")


def _build_server_error(message: str) -> EmulatorApiError:
    return EmulatorApiError(500, message, "InternalServerError")
