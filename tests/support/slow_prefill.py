"""In-process engines of any parallel shape: one computes a prompt step by step, controlled by a
test, one pulls its KV meanwhile. Each rank has separate memory, leases and links."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from cleave_worker.transfer import client, layerwise_client, server
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.progress import Progress
from cleave_worker.transfer.sharding import ParallelShape, find_sources
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports.shared_memory import share_memory

from tests.support.kv_server_process import ALONE, KEY, LAYOUT, caches, register_kv

BOUND_S = 60.0
DIGEST = "d"
OWNER_BLOCKS = (3, 9, 4, 5)
HERE = (7, 6, 8, 1)
WHOLE = Progress(4, 4, 0)


class PrefillRank:
    """Computes its part of one prompt."""

    def __init__(self, shape: ParallelShape = ALONE, rank: int = 0) -> None:
        self.tensors = caches(0, shape, rank)
        self._computed = caches(1000, shape, rank)
        registered = register_kv("boot-p", self.tensors, shape, rank, KEY)
        self.holds = BlockLeases(BOUND_S, BOUND_S)
        self.pull_requested = threading.Semaphore(0)
        """Released at each request for progress."""
        self._follow = self.holds.wait_for_progress
        self.holds.wait_for_progress = self._note  # type: ignore[method-assign]
        self.owner = server.KvServer(
            registered, self.holds, share_memory(registered.memory), 0, BOUND_S
        )

    def _note(self, *args: object, **kwargs: bool) -> object:
        self.pull_requested.release()
        return self._follow(*args, **kwargs)  # type: ignore[arg-type]

    def begin(self, epoch: int = 1) -> None:
        self.holds.begin_prefill(
            "theirs", PrefillInProgress(epoch, DIGEST, len(OWNER_BLOCKS), "name")
        )

    def compute(self, *steps: Progress) -> None:
        """Write the KV that each step completes, and only that, then report the progress."""
        for step in steps:
            for number, block in enumerate(OWNER_BLOCKS):
                final = len(self.tensors) if number < step.blocks_done else step.layers_done
                for layer in range(final if number < step.blocks_started else 0):
                    self.tensors[layer][block] = self._computed[layer][block]
            known = OWNER_BLOCKS[: max(step.blocks_done, step.blocks_started)]
            self.holds.update_progress("theirs", known, step)

    def steps_by_layer(self) -> list[Progress]:
        """Two chunks of the prompt, layer by layer."""
        planes = range(1, len(self.tensors) + 1)
        steps = [Progress(first, first + 2, count) for first in (0, 2) for count in planes]
        return [*steps, WHOLE]

    def end(self, epoch: int = 1) -> None:
        self.holds.grant("theirs", FinishedPrefill(epoch, DIGEST, OWNER_BLOCKS))

    def handoff(self, **changed: object) -> Handoff:
        """A handoff before the prefill has finished, with the address of this rank alone."""
        fields = {
            "boot_id": "boot-p",
            "request_id": "name",
            "epoch": 0,
            "prompt_digest": "",
            "key": KEY,
        }
        address = (("127.0.0.1", self.owner.port),)
        return Handoff(**(fields | {"num_tokens": 0, "addresses": address} | changed))


class Prefill:
    """All ranks."""

    def __init__(self, shape: ParallelShape) -> None:
        self.shape = shape
        self.ranks = [PrefillRank(shape, rank) for rank in range(shape.num_ranks)]
        for one in self.ranks:
            one.owner.set_rank_addresses(
                tuple(("127.0.0.1", other.owner.port) for other in self.ranks)
            )

    def begin(self) -> None:
        for one in self.ranks:
            one.begin()

    def end(self, ranks: Iterable[PrefillRank] | None = None) -> None:
        for one in self.ranks if ranks is None else ranks:
            one.end()

    def freed(self) -> list[bool]:
        """By rank: whether its blocks were freed since the last call."""
        return [one.holds.take_freed() == {"theirs"} for one in self.ranks]

    def num_followers(self, ours: ParallelShape) -> list[int]:
        """By rank: number of ranks of the other engine that pull from it."""
        heads = LAYOUT.num_kv_heads
        found = [
            source.rank
            for rank in range(ours.num_ranks)
            for source in find_sources(ours, rank, self.shape, heads)
            if source.part
        ]
        return [found.count(rank) for rank in range(self.shape.num_ranks)]

    def close(self) -> None:
        for one in self.ranks:
            if not one.owner._listener._closed:
                one.owner.close()


class Decode:
    """The engine that pulls."""

    def __init__(
        self,
        *ways: Transport,
        patience_s: float = BOUND_S,
        shape: ParallelShape = ALONE,
        boot_id: str = "boot-d",
    ) -> None:
        self.shape = shape
        self.tensors = [caches(0, shape, rank) for rank in range(shape.num_ranks)]
        self.readers = [
            client.KvClient(register_kv(boot_id, one, shape, rank), ways, BOUND_S, check_bytes=True)
            for rank, one in enumerate(self.tensors)
        ]
        self.followers = [layerwise_client.LayerwiseClient(one, patience_s) for one in self.readers]
        self.pool = ThreadPoolExecutor(8)

    def follow(
        self, handoff: Handoff, blocks: Sequence[int] = HERE, first: int = 0, rank: int = 0
    ) -> Future[Transport]:
        follow = self.followers[rank].pull
        return self.pool.submit(follow, handoff, DIGEST, first, blocks)

    def follow_all(self, handoff: Handoff) -> list[Future[Transport]]:
        return [self.follow(handoff, rank=rank) for rank in range(len(self.readers))]

    def has_what_was_computed(self, rank: int = 0) -> bool:
        """Whether exactly the prompt's blocks were copied."""
        computed, expected = caches(1000, self.shape, rank), caches(0, self.shape, rank)
        for own, layer in zip(expected, computed, strict=True):
            own[list(HERE)] = layer[list(OWNER_BLOCKS)]
        return all(map(torch.equal, self.tensors[rank], expected))

    def close(self) -> None:
        for one in self.readers:
            one.close()
        self.pool.shutdown(cancel_futures=True)


def reason(following: Future[Transport]) -> RefusalReason:
    """Why the pull was refused."""
    with pytest.raises(RefusedError) as caught:
        following.result(BOUND_S)
    return caught.value.reason
