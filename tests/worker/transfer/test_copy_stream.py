"""Copies on a GPU, as far as a machine without one shows: device, stream and waiting."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import copy_stream  # noqa: E402


class FakeCuda:
    """torch.cuda as far as copies use it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.current = "the default stream"

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("device", device.index))

    def Stream(self, device: torch.device) -> str:  # noqa: N802
        return f"a stream of {device.index}"

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def default_stream(self, device: torch.device) -> str:
        return "the default stream"

    def set_stream(self, stream: str) -> None:
        self.current = stream
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
    return fake


def test_a_thread_gets_the_ranks_device_and_a_stream_of_its_own(cuda: FakeCuda) -> None:
    copy_stream.select_copy_stream(torch.device("cuda", 3))
    assert cuda.calls == [("device", 3), ("stream", "a stream of 3")]


def test_a_thread_keeps_the_stream_that_it_has(cuda: FakeCuda) -> None:
    for _ in range(2):
        copy_stream.select_copy_stream(torch.device("cuda", 3))
    assert [call for call in cuda.calls if call[0] == "stream"] == [("stream", "a stream of 3")]


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
