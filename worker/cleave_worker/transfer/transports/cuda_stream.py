"""CUDA streams that the process shares with nothing else. Used by `NcclLibrary` and
`ThreadStream`; `CudaMappingCalls` uses the runtime.

torch.cuda.Stream takes the next of 32 streams per GPU and then begins again with the first, so two
users of it may get the same one. A kernel of NCCL stays on its stream until the peer comes; copies
or another peer's kernels behind it would wait for that peer.
"""

import ctypes
import functools

import torch

from cleave_worker.transfer.transport import LinkError

_NON_BLOCKING = 1
"""cudaStreamNonBlocking: never waits for the legacy default stream, on which a model may run."""


def create_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream; the caller must `release_stream` it. Raises LinkError."""
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        call_runtime(
            "cudaStreamCreateWithFlags", ctypes.byref(pointer), ctypes.c_uint(_NON_BLOCKING)
        )
    return torch.cuda.ExternalStream(pointer.value, device)


def release_stream(stream: torch.cuda.Stream) -> None:
    """Free a stream, on which nothing may be enqueued any more. Raises LinkError."""
    call_runtime("cudaStreamDestroy", ctypes.c_void_p(stream.cuda_stream))


def call_runtime(name: str, *arguments: object) -> None:
    """Call a function of the CUDA runtime. Raises LinkError."""
    runtime = load_runtime()
    if result := getattr(runtime, name)(*arguments):
        # Otherwise torch's next launch in this thread would report it.
        runtime.cudaGetLastError()
        raise LinkError(f"{name} returned error {result}")


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """Return the libcudart that torch has loaded. Raises LinkError when this torch has none."""
    if torch.version.cuda is None:
        raise LinkError("this torch is built without CUDA")
    try:
        # The loader finds a library that is loaded already by its name, wherever it lies.
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        raise LinkError(f"the CUDA runtime cannot be loaded: {error}") from error
