"""Hand-offs over NCCL: the engine outlives each fault of a peer, and uses no wrong KV."""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import protocol  # noqa: E402
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill  # noqa: E402
from cleave_worker.transfer.client import KvClient  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.memory import Memory  # noqa: E402
from cleave_worker.transfer.rank_resolver import find_remote_ranks  # noqa: E402
from cleave_worker.transfer.server import KvServer  # noqa: E402
from cleave_worker.transfer.transport import LinkError, Transport  # noqa: E402
from cleave_worker.transfer.transports import nccl, nixl  # noqa: E402
from cleave_worker.transfer.transports.two_sided import Rendezvous  # noqa: E402

from tests.support.fake_nccl import FakeNccl, Fault  # noqa: E402
from tests.support.kv_connections import ConnectedPairs  # noqa: E402
from tests.support.kv_server_process import KEY, caches, register_kv  # noqa: E402

BOUND_S = 60.0
TRANSFER_S = 0.5
BLOCKS = (3, 4, 9)
OWN = (10, 11, 2)


class Pair:
    """A prefill and a decode engine in this process."""

    def __init__(self, *ways: Transport) -> None:
        self.theirs, self.ours = caches(1000), caches(0)
        self.before = [layer.clone() for layer in self.ours]
        self.leases = BlockLeases(BOUND_S, BOUND_S)
        kv = register_kv("boot-p", self.theirs, key=KEY)
        self.owner = KvServer(kv, self.leases, (), 0, TRANSFER_S)
        self.reader = KvClient(register_kv("boot-d", self.ours), ways, TRANSFER_S)
        self._epoch = 0

    def pull(self) -> Transport:
        """Hold a prompt, and pull it."""
        self._epoch += 1
        name = f"r{self._epoch}"
        self.leases.grant(name, FinishedPrefill(self._epoch, "d", BLOCKS))
        address = (("127.0.0.1", self.owner.port),)
        handoff = Handoff("boot-p", name, self._epoch, "d", 48, address, key=KEY)
        return self.reader.pull(handoff, "d", 0, OWN)

    def refused(self) -> RefusalReason:
        with pytest.raises(RefusedError) as caught:
            self.pull()
        return caught.value.reason

    def has_pulled(self) -> bool:
        pairs = zip(self.ours, self.theirs, strict=True)
        return all(torch.equal(own[[*OWN]], other[[*BLOCKS]]) for own, other in pairs)

    def is_untouched(self) -> bool:
        return all(map(torch.equal, self.ours, self.before))

    def await_freed(self) -> None:
        await_that(lambda: self.leases.num_leased == 0)

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    fake = FakeNccl()
    monkeypatch.setattr(nccl, "load_api", fake.load)
    monkeypatch.setattr("cleave_worker.transfer.server._MESSAGE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("cleave_worker.transfer.client._CONNECT_TIMEOUT_S", 1.0)
    yield fake
    fake.release_aborts.set()
    await_that(lambda: fake.num_communicators == 0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*ways: Transport) -> Pair:
        pairs.append(Pair(*(ways or (Transport.NCCL,))))
        return pairs[-1]

    yield make
    for each in pairs:
        each.close()


Connect = Callable[..., Pair]


def test_blocks_arrive_and_one_communicator_serves_many_prompts(
    library: FakeNccl, connect: Connect
) -> None:
    pair = connect()
    for _ in range(3):
        assert pair.pull() is Transport.NCCL
        assert pair.has_pulled()
    pair.await_freed()
    assert library.most_communicators == 2, "one at each end"


@pytest.mark.parametrize(
    "fault",
    [Fault.HANGS, Fault.LATE, Fault.RAISES, Fault.DIES, Fault.ABORTS, Fault.ABORT_HANGS],
    ids=lambda fault: fault.name.lower(),
)
def test_a_fault_in_a_transfer_costs_that_prompt_and_nothing_else(
    library: FakeNccl, connect: Connect, fault: Fault
) -> None:
    library.fault = fault
    pair = connect()
    begun = time.monotonic()
    assert pair.refused() in (RefusalReason.PEER_LOST, RefusalReason.TIME_OUT)
    assert time.monotonic() - begun < BOUND_S / 2
    assert pair.is_untouched(), "the model never sees bytes of a failed transfer"
    pair.await_freed()
    library.fault = None
    assert pair.pull() is Transport.NCCL, "the next prompt gets a link of its own"
    assert pair.has_pulled()
    pair.await_freed()


def test_a_peer_that_never_joins_costs_a_bounded_time_and_the_next_transport_serves(
    library: FakeNccl, connect: Connect
) -> None:
    library.fault = Fault.NEVER_JOINS
    pair = connect(Transport.NCCL, Transport.GLOO)
    begun = time.monotonic()
    assert pair.pull() is Transport.GLOO
    assert time.monotonic() - begun < BOUND_S / 2
    assert pair.has_pulled()
    await_that(lambda: library.num_communicators == 0)


def test_further_peers_use_the_next_transport(library: FakeNccl, connect: Connect) -> None:
    ways = [connect(Transport.NCCL, Transport.GLOO).pull() for _ in range(6)]
    # Both ends of a pair are in this process, which has room for eight.
    assert ways == [Transport.NCCL] * 4 + [Transport.GLOO] * 2
    assert library.most_communicators == nccl.MAX_COMMUNICATORS


def test_places_of_lost_peers_are_used_again(library: FakeNccl, connect: Connect) -> None:
    for _ in range(6):
        pair = connect(Transport.NCCL)
        pair.pull()
        pair.reader.close()
        await_that(lambda: library.num_communicators == 0)


def test_a_communicator_whose_abort_fails_keeps_its_buffers_and_its_slot(
    library: FakeNccl, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_slots", threading.BoundedSemaphore(4))
    monkeypatch.setattr(nccl, "_unfreed_messages", [])
    library.fault = Fault.ABORT_RAISES
    pair = connect()
    for lost in (1, 2):
        assert pair.refused() in (RefusalReason.PEER_LOST, RefusalReason.TIME_OUT)
        await_that(lambda: library.num_communicators == 0)
        await_that(lambda lost=lost: len(nccl._unfreed_messages) == 2 * lost)  # type: ignore[misc]
    assert not nccl._slots.acquire(blocking=False), "kernels of four may still write"


def test_a_producer_closes_the_link_that_a_new_one_replaces(
    library: FakeNccl, connect: Connect
) -> None:
    pair = connect()
    address = (("127.0.0.1", pair.owner.port),)
    handoff = Handoff("boot-p", "r", 1, "d", 48, address, key=KEY)
    (rank,) = find_remote_ranks(pair.reader.kv, handoff)
    connection, _ = pair.reader.connect(rank, BOUND_S)
    request = protocol.RendezvousRequest(Transport.NCCL)
    links = []
    for _ in range(3):
        response = protocol.send_request(connection, request, protocol.RendezvousResponse, BOUND_S)
        rendezvous = Rendezvous(connection, response.nonce, KEY, BOUND_S)
        memory = pair.reader.kv.memory
        links.append(rendezvous.create_consumer_link(memory, Transport.NCCL, "127.0.0.1"))
    await_that(lambda: library.num_communicators == len(links) + 1)
    connection.close()
    for link in links:
        link.close()


def test_no_communicator_is_made_where_memory_is_short(library: FakeNccl, connect: Connect) -> None:
    library.free_bytes = nccl.COMMUNICATOR_BYTES
    assert connect(Transport.NCCL, Transport.GLOO).pull() is Transport.GLOO
    assert library.most_communicators == 0


def test_a_producer_does_not_wait_for_a_consumer_that_cannot_use_nccl(
    library: FakeNccl, pairs: ConnectedPairs
) -> None:
    memory, host = Memory([torch.zeros(8, dtype=torch.uint8)]), "127.0.0.1"
    accepted, connected = pairs.connect()
    rendezvous, consumer = (Rendezvous(end, b"n", "", BOUND_S) for end in (accepted, connected))
    library.free_bytes = 0
    with pytest.raises(LinkError, match="of free GPU memory"):
        consumer.create_consumer_link(memory, Transport.NCCL, host)
    library.free_bytes = 80 << 30
    begun = time.monotonic()
    with pytest.raises(LinkError, match="the consumer cannot use NCCL"):
        rendezvous.create_producer_link(memory, Transport.NCCL, host)
    assert time.monotonic() - begun < BOUND_S / 2
    assert library.most_communicators == 0


def test_a_producer_waits_for_a_silent_consumer_within_its_limit(
    library: FakeNccl, pairs: ConnectedPairs
) -> None:
    memory, host = Memory([torch.zeros(8, dtype=torch.uint8)]), "127.0.0.1"
    accepted, _silent = pairs.connect()
    with pytest.raises(LinkError, match="peer"):
        Rendezvous(accepted, b"n", "", 0.5).create_producer_link(memory, Transport.NCCL, host)
    assert library.most_communicators == 0


def test_nccl_is_used_only_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(nixl, "_INFINIBAND_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert nixl.choose_transports(gpu) == (Transport.CUDA_IPC, Transport.GLOO)
    monkeypatch.setenv("UCX_TLS", "cuda_ipc,tcp")
    assert nixl.choose_transports(gpu) == (Transport.CUDA_IPC, Transport.NIXL, Transport.GLOO)
    monkeypatch.delenv("UCX_TLS")
    (tmp_path / "mlx5_0").mkdir()
    assert nixl.choose_transports(gpu) == (Transport.CUDA_IPC, Transport.NIXL, Transport.GLOO)
    assert Transport.NCCL not in nixl.choose_transports(torch.device("cpu"))


def test_the_configuration_has_the_layout_of_nccls_header(tmp_path: Path) -> None:
    library = Path(nccl._find_library())
    header = library.parents[1] / "include" / "nccl.h"
    compiler = shutil.which("gcc")
    if not header.exists() or not compiler:
        pytest.skip("no NCCL header or no compiler here")
    own = nccl.build_config()
    fields = ("size", "magic", "version", "blocking", "cgaClusterSize", "minCTAs", "maxCTAs")
    offsets = ", ".join(f"(int)offsetof(ncclConfig_t, {name})" for name in (*fields, "netName"))
    program = f"""
        #include <stddef.h>
        #include <stdio.h>
        typedef void* cudaStream_t;
        #include "nccl_alone.h"
        int main() {{
            ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
            int numbers[] = {{ {offsets}, (int)sizeof(ncclUniqueId), (int)initial.magic,
                initial.blocking, (int)ncclSuccess, (int)ncclInProgress, (int)ncclUint8 }};
            for (unsigned at = 0; at < sizeof(numbers) / sizeof(int); at++)
                printf("%d ", numbers[at]);
        }}"""
    text = "\n".join(
        line for line in header.read_text().splitlines() if "#include <cuda" not in line
    )
    (tmp_path / "nccl_alone.h").write_text(text)
    (tmp_path / "offsets.c").write_text(program)
    binary = tmp_path / "offsets"
    subprocess.run([compiler, "-w", "-o", binary, tmp_path / "offsets.c"], check=True, timeout=60)
    printed = subprocess.run([binary], check=True, capture_output=True, timeout=60).stdout.split()
    names = [name for name, *_ in nccl._Config._fields_]
    expected = [getattr(nccl._Config, name).offset for name in names]
    magic = ctypes.c_int(own.magic).value
    ids = ctypes.sizeof(nccl._UniqueId)
    results = [nccl.NcclResult.SUCCESS, nccl.NcclResult.IN_PROGRESS, nccl._UINT8]
    assert [int(number) for number in printed] == [
        *(*expected, ids, magic, nccl._UNDEFINED),
        *results,
    ]
    assert own.size == ctypes.sizeof(nccl._Config)


def test_the_library_of_the_wheel_answers() -> None:
    try:
        library = ctypes.CDLL(nccl._find_library())
    except OSError:
        pytest.skip("NCCL is not installed")
    for name in (
        *("ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError"),
        *("ncclSend", "ncclRecv", "ncclCommAbort"),
    ):
        assert getattr(library, name)
