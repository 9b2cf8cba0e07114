"""Both ends of a KV hand-off. The engine owns one KvDoor.

As owner it keeps the blocks of finished prefills under leases and serves them over TCP; as reader
it pulls blocks from another engine, for as long as the real bytes would take. What is hard: the
owner must refuse what it no longer holds (another boot, an ended lease, another prompt) rather than
serve whatever lies in the blocks now, the reader must not go on from KV that is not what the
prefill wrote, and every failure must reach the waiting request.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from cleave_worker.emulator import wire
from cleave_worker.emulator.config import KvTransfer
from cleave_worker.emulator.faults import Faults
from cleave_worker.emulator.metrics import Metrics
from cleave_worker.emulator.scheduler import Scheduler
from cleave_worker.emulator.sequence import HandOff, Sequence
from cleave_worker.transfer.leases import Leases

_CONNECT_S = 5.0
_ANSWER_S = 5.0
_IDLE_CONNECTION_S = 60.0
_CORRUPTION = 0x5A5A5A5A


class TransferError(Exception):
    """The KV could not be pulled; the message says why."""


class Held(NamedTuple):
    """What a finished prefill has left for its reader."""

    prompt_digest: bytes
    written: dict[int, int]
    """Block -> content when the prefill ended."""


class KvDoor:
    """Serves held blocks and pulls others' blocks."""

    def __init__(
        self,
        config: KvTransfer,
        scheduler: Scheduler,
        faults: Faults,
        metrics: Metrics,
        on_freed: Callable[[], None],
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._faults = faults
        self._metrics = metrics
        self._on_freed = on_freed
        self._leases = Leases(config.lease_s)
        self._held: dict[str, Held] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._port = config.port
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaiting: dict[Sequence, HandOff] = {}
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on the side channel. Raises OSError when the address is taken."""
        self._server = await asyncio.start_server(self._serve, self.config.host, self.config.port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the side channel and drop what is under way."""
        if self._timer:
            self._timer.cancel()
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self, sequence: Sequence) -> None:
        """Start the lease of a prefill that finished just now."""
        request = sequence.request
        written = self._scheduler.held_contents(request.id) or {}
        self._held[request.id] = Held(request.prompt_digest, written)
        self._leases.grant(request.id, self._now())
        self._set_timer()

    def params_of(self, sequence: Sequence) -> dict[str, object]:
        """vLLM's kv_transfer_params, which the reader needs to pull a held prefill."""
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

    def expect(self, sequence: Sequence, hand_off: HandOff) -> None:
        """Keep the owner's lease alive until the sequence's turn comes."""
        self._awaiting[sequence] = hand_off
        if self._heart is None:
            self._heart = self._spawn(self._beat())

    def forget(self, sequence: Sequence) -> None:
        """No more heartbeats for a sequence: its KV came, failed or is not wanted."""
        self._awaiting.pop(sequence, None)

    def decline(self, hand_off: HandOff) -> None:
        """Tell the owner, in the background, that nobody will pull."""
        self._spawn(self._notify(hand_off, wire.Done(hand_off.engine_id, hand_off.request_id)))

    async def pull(
        self, hand_off: HandOff, prompt_digest: bytes, num_blocks: int, duration_s: float
    ) -> list[int]:
        """The last `num_blocks` contents of a prompt's hand-off, after `duration_s` on the wire.

        Raises TransferError when the owner refuses, does not answer or dies meanwhile, and when
        what came is not what it wrote.
        """
        if hand_off.engine_id == self.config.engine_id:
            raise TransferError("an engine cannot pull KV from itself")
        if len(hand_off.block_ids) < num_blocks:
            raise TransferError(f"{len(hand_off.block_ids)} blocks offered, {num_blocks} needed")
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(hand_off.host, hand_off.port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise TransferError("the prefill instance cannot be reached") from error
        try:
            wanted = list(hand_off.block_ids[-num_blocks:])
            pull = wire.Pull(hand_off.engine_id, hand_off.request_id, wanted, prompt_digest)
            return await self._read(reader, writer, pull, duration_s)
        except (wire.WireError, OSError, TimeoutError) as error:
            raise TransferError(f"the prefill instance was lost: {error}") from error
        finally:
            writer.close()

    async def _read(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pull: wire.Pull,
        duration_s: float,
    ) -> list[int]:
        wire.send(writer, pull)
        async with asyncio.timeout(_ANSWER_S):
            answer = await wire.receive(reader)
        if isinstance(answer, wire.Refusal):
            raise TransferError(answer.reason)
        if not isinstance(answer, wire.Contents) or len(answer.contents) != len(pull.block_ids):
            raise wire.WireError("unexpected answer")
        # The owner sends nothing more: data or an end of the stream means that it is gone.
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await reader.read(1)
                raise wire.WireError("connection closed during the transfer")
        wire.send(writer, wire.Done(pull.engine_id, pull.request_id))
        if wire.sum_up(answer.contents) != answer.checksum:
            self._metrics.corrupt_transfers += 1
            raise TransferError("the KV is not what the prefill instance wrote")
        return answer.contents

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            while True:
                async with asyncio.timeout(_IDLE_CONNECTION_S):
                    message = await wire.receive(reader)
                if isinstance(message, wire.Pull):
                    wire.send(writer, self._answer(message))
                    await writer.drain()
                else:
                    self._note(message)
        except (wire.WireError, OSError, TimeoutError):
            pass
        except asyncio.CancelledError:
            # Only `stop` cancels; asyncio's stream server would log a cancelled handler.
            pass
        finally:
            writer.close()

    def _answer(self, pull: wire.Pull) -> wire.Contents | wire.Refusal:
        if pull.engine_id != self.config.engine_id:
            return wire.Refusal(f"engine {pull.engine_id} is not here any more")
        held = self._held.get(pull.request_id)
        if held is None:
            return wire.Refusal(f"no KV is held for {pull.request_id}")
        if pull.prompt_digest not in (b"", held.prompt_digest):
            self._metrics.foreign_pulls += 1
            return wire.Refusal(f"the KV of {pull.request_id} is of another prompt")
        if not held.written.keys() >= set(pull.block_ids):
            return wire.Refusal(f"blocks asked for do not belong to {pull.request_id}")
        checksum = wire.sum_up([held.written[block] for block in pull.block_ids])
        return self._spoil(wire.Contents(self._read_blocks(pull), checksum))

    def _read_blocks(self, pull: wire.Pull) -> list[int]:
        """What lies in a held request's blocks now, which had better be what was written."""
        stale = self._faults.spend("stale_handoff")
        lying = self._scheduler.held_contents(pull.request_id, stale) or {}
        return [lying[block] for block in pull.block_ids]

    def _spoil(self, answer: wire.Contents) -> wire.Contents:
        """The answer, or what a fault makes of it."""
        faults, contents, checksum = self._faults, answer.contents, answer.checksum
        if faults.spend("wrong_kv"):
            contents = [content ^ _CORRUPTION for content in contents]
            checksum = wire.sum_up(contents)
        if faults.spend("corrupt_handoff"):
            contents = [content ^ _CORRUPTION for content in contents]
        if faults.spend("short_handoff"):
            contents = contents[:-1]
        return wire.Contents(contents, checksum)

    def _note(self, message: wire.Message) -> None:
        if isinstance(message, wire.Done) and message.engine_id == self.config.engine_id:
            if self._leases.end(message.request_id):
                self._release(message.request_id)
                self._on_freed()
        elif isinstance(message, wire.Heartbeat) and message.engine_id == self.config.engine_id:
            for request_id in message.request_ids:
                self._leases.extend(request_id, self._now())

    def _release(self, request_id: str) -> None:
        del self._held[request_id]
        self._scheduler.release(request_id)

    async def _beat(self) -> None:
        while self._awaiting:
            await asyncio.sleep(self.config.lease_s / 6)
            await asyncio.gather(
                *(self._notify(owner, beat) for owner, beat in _beats(self._awaiting.values()))
            )
        self._heart = None

    async def _notify(self, owner: HandOff, message: wire.Message) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(owner.host, owner.port)
                try:
                    wire.send(writer, message)
                    await writer.drain()
                finally:
                    writer.close()
        except (OSError, TimeoutError, UnicodeError):
            self._metrics.failed_notifications += 1

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _set_timer(self) -> None:
        if self._timer is None and (expiry := self._leases.next_expiry) is not None:
            self._timer = asyncio.get_running_loop().call_at(expiry, self._expire)

    def _expire(self) -> None:
        self._timer = None
        expired = self._leases.expire(self._now())
        for request_id in expired:
            self._release(request_id)
        if expired:
            self._metrics.kv_expired += len(expired)
            self._on_freed()
        self._set_timer()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _beats(hand_offs: Iterable[HandOff]) -> list[tuple[HandOff, wire.Heartbeat]]:
    """One heartbeat per owner, with any hand-off that names its address."""
    by_owner: dict[tuple[str, str, int], list[HandOff]] = {}
    for hand_off in hand_offs:
        by_owner.setdefault((hand_off.engine_id, hand_off.host, hand_off.port), []).append(hand_off)
    return [
        (group[0], wire.Heartbeat(engine_id, [one.request_id for one in group]))
        for (engine_id, _, _), group in by_owner.items()
    ]
