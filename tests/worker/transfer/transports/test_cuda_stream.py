"""Streams of the CUDA runtime, as far as a machine without a GPU shows."""

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.transport import LinkError  # noqa: E402
from cleave_worker.transfer.transports import cuda_stream  # noqa: E402

GPU = torch.device("cuda", 3)


class FakeRuntime:
    """libcudart."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 0

    def cudaStreamCreateWithFlags(self, pointer: Any, flags: ctypes.c_uint) -> int:  # noqa: N802
        self.calls.append(("create", flags.value))
        pointer._obj.value = 4096 * len(self.calls)
        return self.result

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append(("cleared",))
        return self.result

    def cudaStreamDestroy(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append(("destroy", pointer.value))
        return self.result


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()

    @contextlib.contextmanager
    def enter(device: torch.device) -> Any:
        fake.calls.append(("enter", device.index))
        yield

    def wrap(pointer: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=pointer, device=device)

    monkeypatch.setattr(cuda_stream, "load_runtime", lambda: fake)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(device=enter, ExternalStream=wrap))
    return fake


def test_a_stream_is_made_on_its_device_and_freed(runtime: FakeRuntime) -> None:
    stream = cuda_stream.create_stream(GPU)
    cuda_stream.release_stream(stream)
    assert runtime.calls == [("enter", 3), ("create", 1), ("destroy", stream.cuda_stream)]
    assert stream.device == GPU


def test_a_refusal_of_the_runtime_is_an_error_of_the_link(runtime: FakeRuntime) -> None:
    runtime.result = 2
    with pytest.raises(LinkError, match="cudaStreamCreateWithFlags returned error 2"):
        cuda_stream.create_stream(GPU)
    assert runtime.calls[-1] == ("cleared",), "torch's next launch does not raise it"


def test_the_runtime_of_torch_has_the_calls() -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    library = cuda_stream.load_runtime()
    assert library.cudaStreamCreateWithFlags
    assert library.cudaStreamDestroy
