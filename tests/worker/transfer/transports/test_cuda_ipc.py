"""CUDA IPC without a GPU: mappings of host memory in its place, and the runtime's calls."""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import client  # noqa: E402
from cleave_worker.transfer.client import KvClient  # noqa: E402
from cleave_worker.transfer.handoff import RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy  # noqa: E402
from cleave_worker.transfer.transport import LinkError, Transport  # noqa: E402
from cleave_worker.transfer.transports import cuda_ipc, cuda_stream  # noqa: E402
from cleave_worker.transfer.transports.cuda_ipc import CudaIpcLink, ExportedRegion  # noqa: E402

from tests.support.kv_server_process import OwnerProcess, caches, register_kv  # noqa: E402
from tests.support.mapping_calls import FakeMappingCalls  # noqa: E402

Start = Callable[..., OwnerProcess]
GPU = torch.device("cuda", 3)
SIZE = 20 << 20
BOUND_S = 60.0
PROMPT = [5, 6, 7, 8]
WAYS = (Transport.CUDA_IPC, Transport.GLOO)
BYTE = RangeCopy(ByteRange(0, 0, 1), ByteRange(0, 0, 1))


@pytest.fixture
def theirs() -> Memory:
    return Memory([torch.randint(1, 255, (SIZE,), dtype=torch.uint8) for _ in range(2)])


@pytest.fixture
def ours() -> Memory:
    return Memory([torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)])


@pytest.fixture
def exported(theirs: Memory) -> Iterator[cuda_ipc.ExportedMemory]:
    export = cuda_ipc.MemoryExport(theirs, FakeMappingCalls())
    found = export.get()
    assert found
    yield found
    assert export.get() is found, "it is exported once"


@pytest.fixture
def link(ours: Memory, exported: cuda_ipc.ExportedMemory) -> Iterator[CudaIpcLink]:
    with closing(CudaIpcLink(ours, exported, FakeMappingCalls(), BOUND_S)) as opened:
        yield opened


@pytest.fixture
def reader() -> Iterator[KvClient]:
    kv = register_kv("boot-d", caches(0))
    with closing(KvClient(kv, WAYS, BOUND_S)) as kv_client:
        yield kv_client


def count_open() -> int:
    return sum(FakeMappingCalls.opened.values())


def test_scattered_ranges_larger_than_the_buffer_arrive(
    theirs: Memory, ours: Memory, link: CudaIpcLink
) -> None:
    moves = [
        RangeCopy(ByteRange(1, 5, 18 << 20), ByteRange(0, 7, 18 << 20)),
        RangeCopy(ByteRange(0, 3, 0), ByteRange(0, 0, 0)),
        RangeCopy(ByteRange(0, 512, 1024), ByteRange(1, 0, 1024)),
    ]
    for _ in range(2):
        link.read(iter(moves), BOUND_S)
    for remote, local in moves:
        assert torch.equal(ours.view(local), theirs.view(remote))
    assert not ours.regions[1][1024:].any()
    link.read(iter([]), BOUND_S)


def test_ranges_beyond_a_region_are_an_error_and_move_nothing(
    ours: Memory, link: CudaIpcLink
) -> None:
    beyond = ByteRange(0, SIZE - 5, 10)
    for remote, local in ((beyond, ByteRange(0, 0, 10)), (ByteRange(0, 0, 10), beyond)):
        with pytest.raises(LinkError, match="leaves region 0"):
            link.read([RangeCopy(remote, local)], BOUND_S)
    assert not ours.regions[0].any()


def test_every_mapping_is_closed_once_with_its_link(
    ours: Memory, exported: cuda_ipc.ExportedMemory
) -> None:
    links = [CudaIpcLink(ours, exported, FakeMappingCalls(), BOUND_S) for _ in range(2)]
    links[0].close()
    links[0].close()
    links[1].read([BYTE], BOUND_S)
    links[1].close()
    assert count_open() == 0
    with pytest.raises(LinkError, match="closed"):
        links[1].read([BYTE], BOUND_S)


def test_memory_without_the_producers_nonce_is_not_read(
    ours: Memory, exported: cuda_ipc.ExportedMemory
) -> None:
    of_another_start = msgspec.structs.replace(exported, nonce=bytes(32))
    with pytest.raises(LinkError, match="not the peer's"):
        CudaIpcLink(ours, of_another_start, FakeMappingCalls(), BOUND_S)
    assert count_open() == 0


def test_a_kernel_that_does_not_end_costs_a_bounded_time_and_writes_no_block(
    ours: Memory, link: CudaIpcLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "_stuck", [])
    hanging = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(cuda_ipc, "record_event", lambda device: hanging)
    with pytest.raises(LinkError, match="in time"):
        link.read([BYTE], 0.05)
    link.close()
    assert not ours.regions[0].any()
    assert count_open() == 3, "a kernel that still runs would fault"
    assert cuda_ipc._stuck == [link], "its buffer is not used for anything else"
    FakeMappingCalls.opened.clear()


def test_an_error_of_cuda_is_one_of_the_link_which_is_then_neither_used_nor_unmapped(
    ours: Memory, link: CudaIpcLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "_stuck", [])

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cuda_ipc, "copy_rows", fail)
    with pytest.raises(LinkError, match="out of memory"):
        link.read([BYTE], BOUND_S)
    monkeypatch.undo()
    with pytest.raises(LinkError, match="closed"):
        link.read([BYTE], BOUND_S)
    link.close()
    assert count_open() == 3
    FakeMappingCalls.opened.clear()


def test_without_memory_for_a_buffer_there_is_no_link(
    ours: Memory, exported: cuda_ipc.ExportedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "_BUFFER_BYTES", 1 << 60)
    with pytest.raises(LinkError, match="no buffer of"):
        CudaIpcLink(ours, exported, FakeMappingCalls(), BOUND_S)
    assert count_open() == 0


def test_a_link_that_is_closed_during_a_read_is_unmapped_at_its_end(
    ours: Memory, link: CudaIpcLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def query() -> bool:
        is_reading.set()
        return may_end.wait(BOUND_S)

    running = SimpleNamespace(query=query)
    monkeypatch.setattr(cuda_ipc, "record_event", lambda device: running)
    thread = threading.Thread(target=link.read, args=([BYTE], BOUND_S))
    thread.start()
    assert is_reading.wait(BOUND_S)
    link.close()
    assert count_open() == 3
    may_end.set()
    thread.join(BOUND_S)
    assert count_open() == 0


def test_a_producer_elsewhere_is_read_over_the_next_transport_and_the_reason_logged_once(
    start_owner: Start,
    reader: KvClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cuda_ipc, "find_place", lambda: "another container")
    for boot_id in ("boot-a", "boot-b"):
        owner = start_owner(boot_id=boot_id)
        handoff = owner.hold("r", PROMPT, [1])
        assert reader.pull(handoff, handoff.prompt_digest, 0, [1]) is Transport.GLOO
    (line,) = [line for line in caplog.messages if "not pulled" in line]
    assert line == (
        "KV is not pulled over cuda ipc: the peer is not in this container, or exports no memory "
        "(first with boot-a)"
    )


@pytest.mark.parametrize("fault", ["key", "export"])
def test_a_producer_that_exports_nothing_is_read_over_the_next_transport(
    start_owner: Start, reader: KvClient, fault: str
) -> None:
    """Without a key nobody gets a handle; with expandable segments there is none."""
    owner = start_owner(**{"key": {"key": ""}, "export": {"can_export": False}}[fault])
    handoff = owner.hold("r", PROMPT, [1])
    assert reader.pull(handoff, handoff.prompt_digest, 0, [1]) is Transport.GLOO


def test_memory_that_cannot_be_opened_is_read_over_the_next_transport(
    start_owner: Start, reader: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, handle: bytes) -> int:
        raise LinkError("cudaIpcOpenMemHandle returned error 217")

    monkeypatch.setattr(FakeMappingCalls, "open", refuse)
    handoff = start_owner().hold("r", PROMPT, [1])
    assert reader.pull(handoff, handoff.prompt_digest, 0, [1]) is Transport.GLOO


def test_memory_of_a_producer_that_has_died_is_never_used_and_soon_unmapped(
    start_owner: Start, reader: KvClient
) -> None:
    owner = start_owner()
    first, second = (owner.hold(name, PROMPT, [1]) for name in ("r1", "r2"))
    assert reader.pull(first, first.prompt_digest, 0, [1]) is Transport.CUDA_IPC
    reader.close_lost()
    assert count_open() > 0, "a live producer stays mapped"
    owner.command("die")
    owner.process.join(BOUND_S)
    reader.close_lost()
    assert count_open() == 0
    with pytest.raises(RefusedError) as refused:
        reader.pull(second, second.prompt_digest, 0, [1])
    assert refused.value.reason is RefusalReason.PEER_LOST


def test_bytes_of_a_producer_that_dies_during_the_read_are_refused(
    start_owner: Start, reader: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start_owner()
    handoff = owner.hold("r", PROMPT, [1])
    read = CudaIpcLink.read

    def die_after(self: CudaIpcLink, copies: Any, seconds: float) -> None:
        read(self, copies, seconds)
        owner.command("die")
        owner.process.join(BOUND_S)

    monkeypatch.setattr(client.cuda_ipc.CudaIpcLink, "read", die_after)
    with pytest.raises(RefusedError) as refused:
        reader.pull(handoff, handoff.prompt_digest, 0, [1])
    assert refused.value.reason is RefusalReason.PEER_LOST
    assert count_open() == 0


class FakeRuntime:
    """libcudart and libcuda, of which one allocation begins at 0x7000."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.result = 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append(("range", pointer.value))
        base._obj.value = 0x7000
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, base: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append(("get", base.value))
        handle._obj.reserved[:] = [7] * 63 + [0]
        return self.result

    def cudaIpcOpenMemHandle(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:  # noqa: N802
        self.calls.append(("open", bytes(handle.reserved), flags.value))
        address._obj.value = 0x9000
        return self.result

    def cudaIpcCloseMemHandle(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append(("close", address.value))
        return self.result

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append("cleared")
        return self.result


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()

    @contextlib.contextmanager
    def enter(device: torch.device) -> Any:
        fake.calls.append(("enter", device.index))
        yield

    monkeypatch.setattr(cuda_stream, "load_runtime", lambda: fake)
    monkeypatch.setattr(cuda_ipc, "_load_driver", lambda: fake)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(device=enter))
    return fake


REGION = SimpleNamespace(data_ptr=lambda: 0x7100, numel=lambda: 50)
HANDLE = bytes([7] * 63 + [0])


def test_a_region_is_exported_by_its_allocation_and_offset(runtime: FakeRuntime) -> None:
    region = cuda_ipc.CudaMappingCalls(GPU).export(REGION)
    assert region == ExportedRegion(HANDLE, 0x100, 50)
    assert runtime.calls == [("enter", 3), ("range", 0x7100), ("get", 0x7000)]


def test_memory_of_another_allocator_is_refused_in_a_sentence(runtime: FakeRuntime) -> None:
    runtime.result = 1
    with pytest.raises(LinkError, match=r"error 1: KV has no handle with expandable segments"):
        cuda_ipc.CudaMappingCalls(GPU).export(REGION)
    assert runtime.calls[-1] == "cleared", "torch's next launch does not raise it"


def test_a_handle_is_opened_with_peer_access_and_closed(runtime: FakeRuntime) -> None:
    calls = cuda_ipc.CudaMappingCalls(GPU)
    calls.close(calls.open(HANDLE))
    enter = ("enter", 3)
    assert runtime.calls == [enter, ("open", HANDLE, 1), enter, ("close", 0x9000)]


def test_only_memory_of_a_gpu_has_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cuda_ipc.find_calls(torch.device("cpu")) is None
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    assert isinstance(cuda_ipc.find_calls(GPU), cuda_ipc.CudaMappingCalls)
    library = cuda_stream.load_runtime()
    for name in ("cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"):
        assert getattr(library, name)
    assert library.cudaGetLastError


def test_a_place_is_the_same_for_every_process_of_a_container() -> None:
    boot, pids, ipc = cuda_ipc.find_place().split("/")
    assert len(boot) == 36
    assert pids.startswith("pid:[")
    assert ipc.startswith("ipc:[")
    assert cuda_ipc.is_here(cuda_ipc.find_place())


def test_a_kernel_that_does_not_name_its_place_is_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_ipc, "_BOOT_ID", tmp_path / "absent")
    monkeypatch.setattr(cuda_ipc, "find_place", cuda_ipc.find_place.__wrapped__)
    assert cuda_ipc.find_place() == ""
    assert not cuda_ipc.is_here("")
