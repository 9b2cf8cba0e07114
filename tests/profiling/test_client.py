import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cleave.profiling.client import OpenAIClient
from cleave.profiling.errors import ProfilingError, unwrap_group


async def test_a_stream_has_a_time_for_each_token(serve: Callable[..., Awaitable]) -> None:
    running = await serve()
    client = OpenAIClient(running.url, "m")
    seen: list[int] = []
    answer = await client.complete([9] * 20, 7, lambda _now, count: seen.append(count))
    assert (answer.num_tokens, len(answer.token_s)) == (7, 7)
    assert list(answer.token_s) == sorted(answer.token_s)
    assert answer.sent_s <= answer.token_s[0]
    assert 0 <= answer.ttft_ms <= answer.latency_ms
    assert sum(seen) == 7 + 2, "tokens, usage and the end mark"


async def test_an_engine_error_is_reported_verbatim(
    serve: Callable[..., Awaitable],
) -> None:
    running = await serve()
    with pytest.raises(ProfilingError, match=r"status 404: .*`other` does not exist"):
        await OpenAIClient(running.url, "other").complete([9], 1)
    with pytest.raises(ProfilingError, match="/nothing answers with status 404"):
        await OpenAIClient(running.url, "m").get("/nothing")


async def test_a_request_that_is_cut_off_leaves_nothing_on_the_engine(
    serve: Callable[..., Awaitable],
) -> None:
    running = await serve(time_scale=1.0)
    task = asyncio.create_task(OpenAIClient(running.url, "m").complete([9] * 20, 2000))
    async with asyncio.timeout(10):
        while not running.engine.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        while running.engine.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert task.cancelled() or task.cancelling()


async def test_a_key_goes_with_every_request() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    url = f"http://{host}:{port}/below"
    assert (
        await OpenAIClient(url, headers={"Authorization": "Bearer secret"}).get_json("/version")
        == {}
    )
    server.close()
    await server.wait_closed()
    assert heads[0].startswith(b"GET /below/version HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in heads[0]


async def test_an_engine_that_hangs_is_given_up(serve: Callable[..., Awaitable]) -> None:
    running = await serve(time_scale=100.0)
    with pytest.raises(ProfilingError, match=r"has not answered in 0 s"):
        await OpenAIClient(running.url, "m", timeout_s=0.2).complete([9] * 20, 2)


async def test_a_refused_connection_is_one_line() -> None:
    with pytest.raises(ProfilingError, match=r"http://127.0.0.1:9 cannot be reached"):
        await OpenAIClient("http://127.0.0.1:9").get("/version")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ProfilingError, match="is no URL"):
        OpenAIClient(url)


async def test_a_group_of_faults_is_one_fault() -> None:
    async def fail(text: str) -> None:
        raise ProfilingError(text)

    async def fail_twice() -> None:
        async with unwrap_group(), asyncio.TaskGroup() as group:
            group.create_task(fail("a"))
            group.create_task(fail("b"))

    with pytest.raises(ProfilingError, match=r"^a$"):
        await fail_twice()
