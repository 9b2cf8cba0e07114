"""Two-sided links of KV on a device that is not the host, simulated: what is staged and awaited."""

import threading
import time
from queue import Empty, Queue
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.memory import ByteRange, Memory  # noqa: E402
from cleave_worker.transfer.transport import LinkError  # noqa: E402
from cleave_worker.transfer.transports import two_sided  # noqa: E402

BOUND_S = 60.0
SIZE = 20 << 20


class DeviceMemory(Memory):
    """Memory that says it is on a GPU."""

    def __init__(self, region: torch.Tensor) -> None:
        super().__init__([region])
        self.device = SimpleNamespace(type="cuda")


class QueueChannel:
    """One end of a channel between two threads."""

    device = torch.device("cpu")

    def __init__(self, sent: "Queue[torch.Tensor]", received: "Queue[torch.Tensor]") -> None:
        self._sent, self._received = sent, received

    def send(self, message: torch.Tensor) -> SimpleNamespace:
        self._sent.put(message.clone())
        return SimpleNamespace(wait=lambda _: None)

    def receive(self, message: torch.Tensor) -> SimpleNamespace:
        def wait(seconds: float) -> None:
            try:
                message.copy_(self._received.get(timeout=seconds))
            except Empty as error:
                raise RuntimeError("as gloo reports a timeout") from error

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        pass


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Waits for copies, in order, and staging buffers in place of a GPU's."""
    found: list[str] = []
    empty = torch.empty

    def allocate(*size: int, **options: object) -> torch.Tensor:
        return empty(*size, dtype=options["dtype"])

    monkeypatch.setattr(two_sided, "wait_for_copies", lambda device: found.append(device.type))
    monkeypatch.setattr(two_sided, "_staging_pool", two_sided._StagingPool())
    monkeypatch.setattr(two_sided.torch, "empty", allocate)
    return found


def connect(theirs: Memory, ours: Memory) -> tuple[two_sided.TwoSidedLink, two_sided.TwoSidedLink]:
    one: Queue[torch.Tensor] = Queue()
    other: Queue[torch.Tensor] = Queue()
    sender = two_sided.TwoSidedLink(theirs, QueueChannel(one, other))
    return sender, two_sided.TwoSidedLink(ours, QueueChannel(other, one))


def test_kv_of_a_gpu_goes_through_host_memory_and_every_copy_is_silent(waits: list[str]) -> None:
    theirs = DeviceMemory(torch.randint(0, 255, (SIZE,), dtype=torch.uint8))
    ours = DeviceMemory(torch.zeros(SIZE, dtype=torch.uint8))
    sender, receiver = connect(theirs, ours)
    spans = [ByteRange(0, at, 1 << 19) for at in range(0, SIZE, 1 << 20)]
    thread = threading.Thread(target=sender.send, args=(spans, BOUND_S))
    thread.start()
    thread.join(BOUND_S)
    sent = waits.count("cuda")
    receiver.receive(spans, BOUND_S)
    for span in spans:
        assert torch.equal(ours.view(span), theirs.view(span))
    # Two chunks of 10 MiB, and the end of the use of a staging buffer, at each end.
    assert sent == 3
    assert waits.count("cuda") - sent == 3


def test_an_engine_never_sees_kv_before_its_last_copy_is_done(waits: list[str]) -> None:
    ours = DeviceMemory(torch.zeros(SIZE, dtype=torch.uint8))
    sender, receiver = connect(DeviceMemory(torch.ones(SIZE, dtype=torch.uint8)), ours)
    sender.send([ByteRange(0, 0, 4096)], BOUND_S)
    waits.clear()
    copied: list[int] = []
    scatter = ours.copy_from
    ours.copy_from = lambda *a: (scatter(*a), copied.append(len(waits)))  # type: ignore[method-assign, assignment]
    receiver.receive([ByteRange(0, 0, 4096)], BOUND_S)
    assert len(waits) > copied[-1], "a wait follows the scatter"


def test_a_staging_buffer_is_returned_after_a_failure(waits: list[str]) -> None:
    ours = DeviceMemory(torch.zeros(SIZE, dtype=torch.uint8))
    for _ in range(two_sided._MAX_STAGING_BUFFERS + 1):
        _, receiver = connect(ours, ours)
        with pytest.raises(LinkError, match=r"receiving failed"):
            receiver.receive([ByteRange(5, 0, 10)], 0.01)
    assert not ours.regions[0].any()


def test_transfers_beyond_the_staging_buffers_wait_for_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_sided, "_MAX_STAGING_BUFFERS", 1)
    pool, device = two_sided._StagingPool(), torch.device("cpu")
    first = pool.acquire(device, time.monotonic())
    with pytest.raises(LinkError, match="none ended in time"):
        pool.acquire(device, time.monotonic() + 0.05)
    pool.release(first)
    assert pool.acquire(device, time.monotonic()) is first


def test_a_staging_buffer_that_does_not_fit_costs_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pool, device = two_sided._StagingPool(), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(two_sided.torch, "empty", refuse)
        for _ in range(two_sided._MAX_STAGING_BUFFERS):
            with pytest.raises(torch.OutOfMemoryError):
                pool.acquire(device, time.monotonic())
    assert pool.acquire(device, time.monotonic()).regions[0].numel() == two_sided._CHUNK_BYTES
