"""Copies on a GPU, as far as a machine without one shows: device, stream and waiting."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import copy_stream  # noqa: E402


class FakeCuda:
    """torch.cuda as far as copies use it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.num_created = 0

    def create_stream(self, device: torch.device) -> str:
        self.num_created += 1
        return f"stream {self.num_created} of {device.index}"

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("device", device.index))

    def set_stream(self, stream: str) -> None:
        self.calls.append(("stream", stream))

    def Event(self, **options: bool) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(
            record=lambda: self.calls.append(("recorded", options)),
            synchronize=lambda: self.calls.append("waited"),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(copy_stream, "create_stream", fake.create_stream)
    monkeypatch.setattr(copy_stream, "_of_thread", threading.local())
    monkeypatch.setattr(copy_stream.ThreadStream, "_unused", {})
    return fake


def list_streams(cuda: FakeCuda) -> list[str]:
    return [call[1] for call in cuda.calls if call[0] == "stream"]


def test_a_thread_gets_the_ranks_device_and_a_stream_of_its_own(cuda: FakeCuda) -> None:
    copy_stream.select_copy_stream(torch.device("cuda", 3))
    assert cuda.calls == [("device", 3), ("stream", "stream 1 of 3")]


def test_a_thread_keeps_the_stream_that_it_has(cuda: FakeCuda) -> None:
    for _ in range(2):
        copy_stream.select_copy_stream(torch.device("cuda", 3))
    assert list_streams(cuda) == ["stream 1 of 3"]


def test_threads_share_no_stream_and_later_ones_take_those_of_ended_threads(cuda: FakeCuda) -> None:
    def copy_together() -> None:
        barrier = threading.Barrier(40, timeout=10)

        def copy() -> None:
            copy_stream.select_copy_stream(torch.device("cuda", 3))
            barrier.wait()

        threads = [threading.Thread(target=copy) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy_together()
    assert len(set(list_streams(cuda))) == 40
    copy_together()
    assert cuda.num_created == 40
    assert len(list_streams(cuda)) == 80


def test_a_thread_that_copies_nothing_takes_no_stream(cuda: FakeCuda) -> None:
    copy_stream.select_device(torch.device("cuda", 3))
    assert cuda.calls == [("device", 3)]


def test_a_wait_sleeps_until_the_copies_are_done(cuda: FakeCuda) -> None:
    copy_stream.wait_for_copies(torch.device("cuda", 3))
    assert cuda.calls == [("recorded", {"blocking": True}), "waited"]


def test_the_host_needs_neither(cuda: FakeCuda) -> None:
    copy_stream.select_device(torch.device("cpu"))
    copy_stream.select_copy_stream(torch.device("cpu"))
    copy_stream.wait_for_copies(torch.device("cpu"))
    assert copy_stream.record_event(torch.device("cpu")) is None
    assert cuda.calls == []
