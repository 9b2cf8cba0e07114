"""The KV side channel of an emulated engine, both ends of a handoff; the engine owns one.

As producer it leases the blocks of finished prefills and serves them over TCP. As consumer it pulls
blocks from another engine, for as long as the real bytes would take. The producer must refuse
blocks that it no longer leases (another boot, an expired lease, another prompt) instead of serving
their present contents. The consumer must not use KV that the prefill did not write. Every failure
must reach the waiting request.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from cleave_worker.emulator.config import KvTransferConfig
from cleave_worker.emulator.faults import Faults
from cleave_worker.emulator.metrics import EngineMetrics
from cleave_worker.emulator.scheduler import EmulatedScheduler
from cleave_worker.emulator.sequence import PrefixSource, RemotePrefill, Sequence
from cleave_worker.emulator.side_channel_messages import (
    BlockContents,
    Heartbeat,
    Message,
    PrefixReleased,
    PullBlocks,
    PullDone,
    PullPrefix,
    PullRefused,
    ReleasePrefix,
    SideChannelError,
    compute_checksum,
    receive,
    send,
)
from cleave_worker.transfer.leases import LeaseTable

_CONNECT_TIMEOUT_S = 5.0
_RESPONSE_TIMEOUT_S = 5.0
_IDLE_TIMEOUT_S = 60.0
_CORRUPTION = 0x5A5A5A5A


class KvTransferError(Exception):
    """The KV could not be pulled; the message gives the reason."""


class LeasedKv(NamedTuple):
    """A finished prefill whose blocks can be pulled."""

    prompt_digest: bytes
    written: dict[int, int]
    """Content of each block when the prefill ended."""


class KvSideChannel:
    """Serves leased blocks and pulls those of other engines."""

    def __init__(
        self,
        config: KvTransferConfig,
        scheduler: EmulatedScheduler,
        faults: Faults,
        metrics: EngineMetrics,
        on_freed: Callable[[], None],
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._faults = faults
        self._metrics = metrics
        self._on_freed = on_freed
        self._leases = LeaseTable(config.lease_s)
        self._leased: dict[str, LeasedKv] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._port = config.port
        self._num_prefix_pulls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: dict[Sequence, RemotePrefill] = {}
        self._heartbeat_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on the side channel. Raises OSError when the address is taken."""
        self._server = await asyncio.start_server(self._serve, self.config.host, self.config.port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the side channel and cancel its tasks."""
        if self._timer:
            self._timer.cancel()
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def grant_lease(self, sequence: Sequence) -> None:
        """Start the lease of a prefill that has just finished."""
        request = sequence.request
        written = self._scheduler.get_leased_contents(request.id) or {}
        self._leased[request.id] = LeasedKv(request.prompt_digest, written)
        self._leases.grant(request.id, self._get_time())
        self._set_timer()

    def build_params(self, sequence: Sequence) -> dict[str, object]:
        """Return vLLM's kv_transfer_params, which a consumer needs to pull a leased prefill."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [sequence.blocks],
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": sequence.request.id,
            "remote_host": self.config.host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.num_computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": sequence.cached_tokens,
        }

    def expect(self, sequence: Sequence, handoff: RemotePrefill) -> None:
        """Send heartbeats to the producer until the sequence is scheduled."""
        self._expected[sequence] = handoff
        if self._heartbeat_task is None:
            self._heartbeat_task = self._spawn(self._send_heartbeats())

    def forget(self, sequence: Sequence) -> None:
        """Send no more heartbeats for a sequence: its pull ended or was dropped."""
        self._expected.pop(sequence, None)

    def decline(self, handoff: RemotePrefill) -> None:
        """Notify the producer, in the background, that its blocks will not be pulled."""
        self._spawn(self._notify(handoff, PullDone(handoff.engine_id, handoff.request_id)))

    async def pull(
        self, handoff: RemotePrefill, prompt_digest: bytes, num_blocks: int, duration_s: float
    ) -> list[int]:
        """Return the last `num_blocks` contents of a prompt, after `duration_s` of transfer.

        Raises KvTransferError when the producer refuses, does not respond or dies meanwhile, and
        when the contents are not those that it wrote.
        """
        if handoff.engine_id == self.config.engine_id:
            raise KvTransferError("an engine cannot pull KV from itself")
        if len(handoff.block_ids) < num_blocks:
            raise KvTransferError(f"{len(handoff.block_ids)} blocks offered, {num_blocks} needed")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(handoff.host, handoff.port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise KvTransferError("the prefill instance cannot be reached") from error
        try:
            blocks = list(handoff.block_ids[-num_blocks:])
            pull = PullBlocks(handoff.engine_id, handoff.request_id, blocks, prompt_digest)
            return await self._read(reader, writer, pull, duration_s)
        except (SideChannelError, OSError, TimeoutError) as error:
            raise KvTransferError(f"the prefill instance was lost: {error}") from error
        finally:
            writer.close()

    async def pull_prefix(
        self, source: PrefixSource, keys: list[bytes], estimate_s: Callable[[int], float]
    ) -> list[int]:
        """Return the contents of the leading blocks of `keys` that another engine has cached; none
        if it has none. `estimate_s`: seconds of the transfer of so many blocks.

        The blocks are leased while they are read, and used only if the lease lasted until the end.
        Raises KvTransferError when the other engine is another one than expected, is lost, or sent
        something else than its cache has.
        """
        if source.engine_id == self.config.engine_id:
            raise KvTransferError("an engine cannot pull KV from itself")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(source.host, source.port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise KvTransferError("the instance with the prefix cannot be reached") from error
        self._num_prefix_pulls += 1
        lease = f"prefix-{self.config.engine_id}-{self._num_prefix_pulls}"
        try:
            send(writer, PullPrefix(source.engine_id, lease, keys))
            response = await self._receive_contents(reader)
            if len(response.contents) > len(keys):
                raise SideChannelError("unexpected response")
            if not response.contents:
                return []
            await _wait_for_transfer(reader, estimate_s(len(response.contents)))
            send(writer, ReleasePrefix(source.engine_id, lease))
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                released = await receive(reader)
        except (SideChannelError, OSError, TimeoutError) as error:
            raise KvTransferError(f"the instance with the prefix was lost: {error}") from error
        finally:
            writer.close()
        if not isinstance(released, PrefixReleased) or not released.is_valid:
            raise KvTransferError("the prefix's lease ended before it was read")
        self._check(response, "the instance with the prefix has")
        return response.contents

    async def _read(
        self, reader: StreamReader, writer: StreamWriter, pull: PullBlocks, duration_s: float
    ) -> list[int]:
        send(writer, pull)
        response = await self._receive_contents(reader)
        if len(response.contents) != len(pull.block_ids):
            raise SideChannelError("unexpected response")
        await _wait_for_transfer(reader, duration_s)
        send(writer, PullDone(pull.engine_id, pull.request_id))
        self._check(response, "the prefill instance wrote")
        return response.contents

    @staticmethod
    async def _receive_contents(reader: StreamReader) -> BlockContents:
        async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
            response = await receive(reader)
        if isinstance(response, PullRefused):
            raise KvTransferError(response.reason)
        if not isinstance(response, BlockContents):
            raise SideChannelError("unexpected response")
        return response

    def _check(self, response: BlockContents, right: str) -> None:
        if compute_checksum(response.contents) != response.checksum:
            self._metrics.corrupt_transfers += 1
            raise KvTransferError(f"the KV is not what {right}")

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        if task := asyncio.current_task():
            self._retain(task)
        prefixes: set[str] = set()
        try:
            while True:
                async with asyncio.timeout(_IDLE_TIMEOUT_S):
                    message = await receive(reader)
                if isinstance(message, PullBlocks):
                    send(writer, self._build_response(message))
                    await writer.drain()
                elif isinstance(message, PullPrefix):
                    granted = self._grant_prefix(message)
                    # A name that is taken is another connection's, or that of a handoff.
                    if isinstance(granted, BlockContents):
                        prefixes.add(message.lease)
                    send(writer, granted)
                    await writer.drain()
                elif isinstance(message, ReleasePrefix):
                    send(writer, PrefixReleased(self._end_lease(message.engine_id, message.lease)))
                    await writer.drain()
                else:
                    self._handle_notification(message)
        except (SideChannelError, OSError, TimeoutError, asyncio.CancelledError):
            # Only `stop` cancels; asyncio's stream server would log a cancelled handler.
            pass
        finally:
            # A consumer that is gone reads nothing more.
            for lease in prefixes:
                self._end_lease(self.config.engine_id, lease)
            writer.close()

    def _build_response(self, pull: PullBlocks) -> BlockContents | PullRefused:
        if pull.engine_id != self.config.engine_id:
            return PullRefused(f"engine {pull.engine_id} does not run here any more")
        leased = self._leased.get(pull.request_id)
        if leased is None:
            return PullRefused(f"no KV is leased for {pull.request_id}")
        if pull.prompt_digest not in (b"", leased.prompt_digest):
            self._metrics.foreign_pulls += 1
            return PullRefused(f"the KV of {pull.request_id} is of another prompt or other weights")
        if not leased.written.keys() >= set(pull.block_ids):
            return PullRefused(f"the requested blocks do not belong to {pull.request_id}")
        checksum = compute_checksum([leased.written[block] for block in pull.block_ids])
        stale = self._faults.consume("stale_handoff")
        contents = self._scheduler.get_leased_contents(pull.request_id, stale) or {}
        present = [contents[block] for block in pull.block_ids]
        return self._apply_faults(BlockContents(present, checksum))

    def _grant_prefix(self, pull: PullPrefix) -> BlockContents | PullRefused:
        if pull.engine_id != self.config.engine_id:
            return PullRefused(f"engine {pull.engine_id} does not run here any more")
        if pull.lease in self._leased:
            return PullRefused(f"the name {pull.lease} is taken")
        contents = self._scheduler.acquire_cached(pull.lease, pull.keys)
        if contents:
            self._leased[pull.lease] = LeasedKv(b"", {})
            self._leases.grant(pull.lease, self._get_time())
            self._set_timer()
        return self._apply_faults(BlockContents(contents, compute_checksum(contents)))

    def _end_lease(self, engine_id: str, request_id: str) -> bool:
        """Free what is leased; return whether it still was."""
        if engine_id != self.config.engine_id or not self._leases.end(request_id):
            return False
        self._release(request_id)
        self._on_freed()
        return True

    def _apply_faults(self, response: BlockContents) -> BlockContents:
        """Return the response, changed by the active faults."""
        faults, contents, checksum = self._faults, response.contents, response.checksum
        if faults.consume("wrong_kv"):
            contents = [content ^ _CORRUPTION for content in contents]
            checksum = compute_checksum(contents)
        if faults.consume("corrupt_handoff"):
            contents = [content ^ _CORRUPTION for content in contents]
        if faults.consume("short_handoff"):
            contents = contents[:-1]
        return BlockContents(contents, checksum)

    def _handle_notification(self, message: Message) -> None:
        if not isinstance(message, PullDone | Heartbeat):
            return
        if message.engine_id != self.config.engine_id:
            return
        if isinstance(message, Heartbeat):
            for request_id in message.request_ids:
                self._leases.extend(request_id, self._get_time())
        else:
            self._end_lease(message.engine_id, message.request_id)

    def _release(self, request_id: str) -> None:
        del self._leased[request_id]
        self._scheduler.release(request_id)

    async def _send_heartbeats(self) -> None:
        while self._expected:
            await asyncio.sleep(self.config.lease_s / 6)
            heartbeats = _build_heartbeats(self._expected.values())
            await asyncio.gather(*(self._notify(*each) for each in heartbeats))
        self._heartbeat_task = None

    async def _notify(self, handoff: RemotePrefill, message: Message) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(handoff.host, handoff.port)
                try:
                    send(writer, message)
                    await writer.drain()
                finally:
                    writer.close()
        except (OSError, TimeoutError, UnicodeError):
            self._metrics.failed_notifications += 1

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._retain(task)
        return task

    def _retain(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self) -> None:
        if self._timer is None and (expiry := self._leases.next_expiry) is not None:
            self._timer = asyncio.get_running_loop().call_at(expiry, self._expire)

    def _expire(self) -> None:
        self._timer = None
        expired = self._leases.expire(self._get_time())
        for request_id in expired:
            self._release(request_id)
        if expired:
            self._metrics.kv_expired += len(expired)
            self._on_freed()
        self._set_timer()

    @staticmethod
    def _get_time() -> float:
        return asyncio.get_running_loop().time()


async def _wait_for_transfer(reader: StreamReader, duration_s: float) -> None:
    """Wait as long as a transfer takes. Raises SideChannelError when the producer is lost: it sends
    nothing meanwhile, so data or an end of the stream means that."""
    with suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await reader.read(1)
            raise SideChannelError("connection closed during the transfer")


def _build_heartbeats(handoffs: Iterable[RemotePrefill]) -> list[tuple[RemotePrefill, Heartbeat]]:
    """Build one heartbeat per producer, with a handoff that has its address."""
    by_producer: dict[tuple[str, str, int], list[RemotePrefill]] = {}
    for handoff in handoffs:
        by_producer.setdefault((handoff.engine_id, handoff.host, handoff.port), []).append(handoff)
    return [
        (group[0], Heartbeat(engine_id, [each.request_id for each in group]))
        for (engine_id, _, _), group in by_producer.items()
    ]
