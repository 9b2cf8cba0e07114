"""A client of the endpoint picker that sends ext_proc messages in the order of Envoy."""

import asyncio
import json

import grpc

from cleave.gateway.endpoint_picker.ext_proc import (
    CHUNK_BYTES,
    ENDPOINT_KEY,
    NAMESPACE,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from cleave.rpc.v1 import external_processor_pb2 as pb
from cleave.rpc.v1 import external_processor_pb2_grpc

ASK = {"model": "m", "prompt": "say it", "max_tokens": 5}
PATIENCE_S = 15
DUPLEX = pb.FULL_DUPLEX_STREAMED


class Proxy:
    """The ext_proc stream of one HTTP request."""

    def __init__(self, stage, channel, mode: int = DUPLEX) -> None:
        self.stage = stage
        self.mode = mode
        stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
        self.stream = stub.Process()

    async def send(self, **fields: object) -> None:
        await self.stream.write(pb.ProcessingRequest(**fields))

    async def head(
        self,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        bodiless: bool = False,
        subset: list[str] | str | None = None,
        **headers: str,
    ) -> None:
        lines = {":method": method, ":path": path, **headers}
        message = pb.ProcessingRequest(
            request_headers=headers_of(lines, bodiless),
            protocol_config=pb.ProtocolConfiguration(
                request_body_mode=self.mode, response_body_mode=self.mode
            ),
        )
        if subset is not None:
            fields = message.metadata_context.filter_metadata[SUBSET_NAMESPACE]
            fields.update({SUBSET_KEY: subset})
        await self.stream.write(message)

    async def body(self, *pieces: bytes) -> None:
        for number, piece in enumerate(pieces, 1):
            end = number == len(pieces)
            await self.send(request_body=pb.HttpBody(body=piece, end_of_stream=end))

    async def ask(self, body: object = None, **head: object) -> "Placed":
        """Send headers and body in full duplex; return the picker's decision."""
        raw = json.dumps(body or ASK).encode()
        await self.head(**head)
        await self.body(raw[: len(raw) // 2], raw[len(raw) // 2 :])
        return await self.placed()

    async def hear(self) -> pb.ProcessingResponse:
        answer = await asyncio.wait_for(self.stream.read(), PATIENCE_S)
        assert answer is not grpc.aio.EOF
        return answer

    async def placed(self) -> "Placed":
        """Read the picker's responses until the request can be forwarded."""
        first = await self.hear()
        if first.HasField("immediate_response"):
            return Placed(first)
        body = b""
        while True:
            streamed = (await self.hear()).request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= CHUNK_BYTES
            body += streamed.body
            if streamed.end_of_stream:
                return Placed(first, body)

    async def answer(self, status: int = 200, *pieces: bytes) -> bytes:
        """Send a response; return the body that the client would receive."""
        head = headers_of({":status": str(status)}, not pieces)
        await self.stream.write(pb.ProcessingRequest(response_headers=head))
        assert (await self.hear()).HasField("response_headers")
        received = b""
        for number, piece in enumerate(pieces, 1):
            received += await self.pass_on(piece, number == len(pieces))
        return received

    async def pass_on(self, piece: bytes, end: bool = False) -> bytes:
        await self.send(response_body=pb.HttpBody(body=piece, end_of_stream=end))
        answer = await self.hear()
        assert answer.HasField("response_body")
        mutation = answer.response_body.response.body_mutation
        assert mutation.streamed_response.end_of_stream == end
        return mutation.streamed_response.body

    async def stays(self) -> bool:
        """Whether the picker still processes response bodies, although it may skip them."""
        return await self.answer(200, b"one ", b"two") == b"one two"

    async def is_left_alone(self) -> bool:
        """Whether the picker has ended the stream cleanly, so that Envoy continues without it."""
        message = await asyncio.wait_for(self.stream.read(), PATIENCE_S)
        return message is grpc.aio.EOF and await self.stream.code() is grpc.StatusCode.OK


class Placed:
    def __init__(self, answer: pb.ProcessingResponse, body: bytes = b"") -> None:
        self.answer = answer
        self.body = body

    @property
    def headers(self) -> dict[str, str]:
        kind = self.answer.WhichOneof("response")
        mutation = (
            self.answer.immediate_response.headers
            if kind == "immediate_response"
            else getattr(self.answer, kind).response.header_mutation
        )
        for option in mutation.set_headers:
            assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        return {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}

    @property
    def endpoints(self) -> list[str]:
        """The named endpoints; header and metadata must be equal."""
        named = self.headers[ENDPOINT_KEY]
        assert self.answer.dynamic_metadata[NAMESPACE][ENDPOINT_KEY] == named
        return named.split(",")

    @property
    def refused(self) -> tuple[int, dict]:
        response = self.answer.immediate_response
        return response.status.code, json.loads(response.body)["error"]


def headers_of(lines: dict[str, str], end: bool) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in lines.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=end)
