"""The streams between the agents of data-parallel ranks and their launcher, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from cleave.rpc.credentials import TOKEN_ENV
from cleave.rpc.v1 import gang_pb2, gang_pb2_grpc
from cleave_worker.agent.authentication import (
    AuthenticationInterceptor,
    Authenticator,
    TokenSignatures,
)
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.gang.gang_link import (
    SERVER_OPTIONS,
    GangAuthenticator,
    GangLost,
    GangMember,
    GangServer,
    StartRefused,
)
from cleave_worker.agent.launch import MeetingPoint

KEY = "key"
WAIT_S = 20.0


@asynccontextmanager
async def launcher(
    address: str, size: int = 2, others: Authenticator | None = None
) -> AsyncIterator[grpc.aio.Server]:
    interceptors = [AuthenticationInterceptor(GangAuthenticator(KEY, others))] if others else []
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    ports = iter(range(7000, 8000))
    gang = GangServer(size, lambda: MeetingPoint("10.0.0.1", next(ports)))
    gang_pb2_grpc.add_GangServicer_to_server(gang, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


@pytest.fixture
async def join(config: AgentConfig) -> AsyncIterator[Callable[..., GangMember]]:
    """Members of the gang at `config`'s address, which all leave at the end."""
    members: list[GangMember] = []

    def start(
        rank: int, on_drain: Callable[[], None] = lambda: None, **values: object
    ) -> GangMember:
        fields = {"data_parallel_rank": rank, "gang": config.address, "gang_key": KEY, **values}
        member = GangMember(replace(config, **fields), on_drain)
        member.open()
        members.append(member)
        return member

    yield start
    for member in members:
        member.close()


async def start_together(*members: GangMember) -> set[MeetingPoint]:
    async with asyncio.timeout(WAIT_S):
        return {*await asyncio.gather(*(each.wait_for_start("w") for each in members))}


async def test_all_ranks_start_at_one_meeting_point_and_stop_together(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address), asyncio.timeout(WAIT_S):
        first, second = join(0), join(1)
        assert await start_together(first, second) == {MeetingPoint("10.0.0.1", 7000)}
        second.report_lost()
        await asyncio.gather(first.wait_for_stop(), second.wait_for_stop())
        assert await start_together(first, second) == {MeetingPoint("10.0.0.1", 7001)}


async def test_a_rank_that_leaves_stops_all_and_another_takes_its_place(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address), asyncio.timeout(WAIT_S):
        first, second = join(0), join(1)
        await start_together(first, second)
        second.close()
        await first.wait_for_stop()
        assert await start_together(first, join(1)) == {MeetingPoint("10.0.0.1", 7001)}


async def test_a_newer_stream_of_a_rank_replaces_one_whose_end_was_not_noticed(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address), asyncio.timeout(WAIT_S):
        first, lost = join(0), join(1)
        await start_together(first, lost)
        newer = join(1)
        waiting = asyncio.create_task(newer.wait_for_start("w"))
        await first.wait_for_stop()
        with pytest.raises(GangLost, match="has ended"):
            await lost.wait_for_start("w")
        await start_together(first)
        assert await waiting == MeetingPoint("10.0.0.1", 7001)


async def test_ranks_wait_for_their_launcher_and_end_with_it(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    first, second = join(0), join(1)
    starting = asyncio.create_task(start_together(first, second))
    await asyncio.sleep(0.5)
    async with launcher(config.address) as server:
        await starting
        await server.stop(None)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(GangLost, match="is lost"):
                await first.wait_for_stop()


async def test_a_rank_does_not_wait_for_a_launcher_for_ever(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    member = join(1, timing=replace(config.timing, start_timeout=0.3))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(GangLost, match=r"no launcher of the .* at 127.* within 0.3 s"):
            await member.wait_for_start("w")


async def test_a_rank_that_never_joined_drains_at_once(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    member = join(1)
    member.report_drain()
    async with asyncio.timeout(WAIT_S / 2):
        await member.finish_drain(WAIT_S)


async def test_all_ranks_drain_also_one_that_joins_later(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address), asyncio.timeout(WAIT_S):
        drains, later = asyncio.Event(), asyncio.Event()
        first, second = join(0), join(1, drains.set)
        await start_together(first, second)
        first.report_drain()
        await drains.wait()
        second.close()
        # Its place counts as drained, so that the first one does not wait for it.
        await first.finish_drain(WAIT_S)
        again = join(1, later.set)
        again.report_lost()
        await later.wait()


@pytest.mark.parametrize(
    ("key", "token", "fault"),
    [
        ("", "right", None),
        (KEY, "", None),
        ("", "wrong", "signed with another token"),
        ("wrong", "", "is not signed with a token file"),
        ("", "", "the call is not signed"),
    ],
)
async def test_ranks_join_with_the_launchers_key_or_the_deployments_token(
    config: AgentConfig,
    join: Callable[..., GangMember],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    token: str,
    fault: str | None,
) -> None:
    (tmp_path / "right").write_text("right")
    if token:
        (tmp_path / "own").write_text(token)
        monkeypatch.setenv(TOKEN_ENV, str(tmp_path / "own"))
    async with launcher(config.address, 1, TokenSignatures(tmp_path / "right", config.address)):
        member = join(0, gang_key=key)
        if fault is None:
            await start_together(member)
        else:
            with pytest.raises(GangLost, match=fault):
                await start_together(member)


async def test_a_rank_of_another_instance_is_refused(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address):
        with pytest.raises(GangLost, match="rank 2 is not one of the instance's 2"):
            await start_together(join(2))


async def test_an_event_of_a_later_version_ends_the_stream_of_its_rank_only(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with (
        launcher(config.address),
        grpc.aio.insecure_channel(config.address) as channel,
        asyncio.timeout(WAIT_S),
    ):
        first = join(0)
        metadata = (("authorization", f"Bearer {KEY}"),)
        stream = gang_pb2_grpc.GangStub(channel).Join(metadata=metadata)
        await stream.write(gang_pb2.RankReport(rank=1, event=99))
        assert await stream.read() is grpc.aio.EOF
        await start_together(first, join(1))


class LaterLauncher(gang_pb2_grpc.GangServicer):
    """Sends an order that this version does not know."""

    async def Join(  # noqa: N802
        self, requests: AsyncIterator[gang_pb2.RankReport], context: object
    ) -> AsyncIterator[gang_pb2.RankOrder]:
        async for _ in requests:
            yield gang_pb2.RankOrder(command=99)


async def test_a_rank_ends_at_an_order_of_a_later_version(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    server = grpc.aio.server()
    gang_pb2_grpc.add_GangServicer_to_server(LaterLauncher(), server)
    server.add_insecure_port(config.address)
    await server.start()
    with pytest.raises(GangLost, match="of another version: 99 is not a valid Order"):
        await start_together(join(0))
    await server.stop(None)


async def test_ranks_that_find_different_weights_all_learn_why_and_may_try_again(
    config: AgentConfig, join: Callable[..., GangMember]
) -> None:
    async with launcher(config.address), asyncio.timeout(WAIT_S):
        first, second = join(0), join(1)
        waiting = asyncio.gather(
            first.wait_for_start("a1"), second.wait_for_start("b2"), return_exceptions=True
        )
        for refused in await waiting:
            assert isinstance(refused, StartRefused)
            assert "a1 at rank 0, b2 at rank 1" in str(refused)
        assert await start_together(first, second) == {MeetingPoint("10.0.0.1", 7000)}
