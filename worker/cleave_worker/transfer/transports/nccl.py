"""Messages between two GPUs over NCCL, without torch's process groups. Used by `TwoSidedLink`.

torch's ProcessGroupNCCL has a watchdog that ends the process when a peer is late or lost, sets up
communicators in a call without a time limit, and its wait with a time limit polls once per
millisecond. An engine must survive a peer. So this module calls NCCL itself, in its non-blocking
mode: every call returns at once, the state is polled until a deadline, and a communicator that
failed is aborted in a thread that nothing waits for.

A communicator takes some 340 MiB of the GPU beside vLLM's own share, and its kernels occupy
processors while they wait for the peer. So there are few, and none where memory is short.
"""

import ctypes
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import Store

from cleave_worker.transfer.transport import LinkError, PendingMessage
from cleave_worker.transfer.transports.cuda_stream import create_stream, release_stream

_log = logging.getLogger(__name__)
MAX_COMMUNICATORS = 8
"""Per process; a further peer uses the next transport."""
COMMUNICATOR_BYTES = 342 << 20
"""GPU memory of a communicator of two ranks on an H200 (ai-dynamo/aiconfigurator, Apache-2.0:
systems/h200_sxm.yaml, nccl_mem)."""
_POLL_S = 0.0001
_ID_BYTES = 128
_ID_KEY = "nccl-id"
_CONSUMER_KEY = "nccl-consumer"
_JOINED, _REFUSED = "joined", "refused"
"""Values of `_CONSUMER_KEY`."""


class NcclResult(IntEnum):
    """ncclResult_t, as far as this module treats values differently."""

    SUCCESS = 0
    IN_PROGRESS = 7


class CompletionEvent(Protocol):
    """A point in a GPU's command queue."""

    def query(self) -> bool:
        """Return whether the GPU has reached it."""


class NcclApi(Protocol):
    """The calls of NCCL; none of them blocks. A communicator is a number. Raise LinkError."""

    def create_id(self) -> bytes:
        """Return the id under which two ranks meet."""

    def begin_init(self, unique_id: bytes, rank: int) -> int:
        """Start to create a communicator."""

    def get_state(self, communicator: int) -> int:
        """Return the ncclResult_t of what was started last."""

    def send(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        """Enqueue on the channel's stream."""

    def receive(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        """Enqueue on the channel's stream."""

    def record(self) -> CompletionEvent:
        """Return an event behind all that was enqueued."""

    def abort(self, communicator: int) -> None:
        """End its kernels, free it and the channel's stream; may take long."""

    def get_free_bytes(self) -> int:
        """Return the free memory of the GPU."""


class NcclChannel:
    """A `MessageChannel` over a communicator of two ranks."""

    def __init__(self, store: Store, rank: int, device: torch.device, seconds: float) -> None:
        """Raises LinkError when the peer does not come within `seconds` or refuses, or no memory is
        left."""
        self.device = device
        self._peer = 1 - rank
        deadline = time.monotonic() + seconds
        try:
            self._api = load_api(device)
            _reserve_communicator(self._api)
        except LinkError:
            if rank == 1:
                store.set(_CONSUMER_KEY, _REFUSED)
            raise
        self._lock = threading.Lock()
        self._communicator: int | None = None
        self._is_aborted = False
        self._messages: list[torch.Tensor] = []
        """Buffers that kernels may use until the communicator is aborted."""
        try:
            unique_id = _exchange_id(store, rank, self._api)
            self._communicator = self._api.begin_init(unique_id, rank)
            while not self.is_idle():
                _sleep_until(deadline, "the peer did not join in time")
        except BaseException:
            self.abort()
            raise

    def send(self, message: torch.Tensor) -> PendingMessage:
        """Start to send."""
        return self._enqueue(self._api.send, message)

    def receive(self, message: torch.Tensor) -> PendingMessage:
        """Start to receive."""
        return self._enqueue(self._api.receive, message)

    def abort(self) -> None:
        """Abort the communicator, in a thread of its own: nothing of the engine waits for it."""
        with self._lock:
            communicator, self._communicator = self._communicator, None
            if self._is_aborted:
                return
            self._is_aborted = True
        threading.Thread(
            target=self._end_communicator, args=(communicator,), name="kv-abort", daemon=True
        ).start()

    def is_idle(self) -> bool:
        """Return whether NCCL has accepted all calls. Raises LinkError when the peer is lost."""
        with self._lock:
            state = self._api.get_state(self._require_communicator())
        if state not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            raise LinkError(f"NCCL reports error {state}")
        return state == NcclResult.SUCCESS

    def record(self) -> CompletionEvent:
        """Return an event behind all that was enqueued. Raises LinkError after an abort, which
        frees the stream."""
        with self._lock:
            self._require_communicator()
            return self._api.record()

    def _require_communicator(self) -> int:
        if self._communicator is None:
            raise LinkError("the link is closed")
        return self._communicator

    def _enqueue(
        self, call: Callable[[int, torch.Tensor, int], None], message: torch.Tensor
    ) -> PendingMessage:
        with self._lock:
            communicator = self._require_communicator()
            self._messages = [*self._messages[-3:], message]
            call(communicator, message, self._peer)
        return _NcclMessage(self)

    def _end_communicator(self, communicator: int | None) -> None:
        try:
            if communicator is not None:
                self._api.abort(communicator)
        except LinkError as error:
            # Its kernels may still write: its buffers must not be reused, and it keeps its memory.
            _log.warning("a communicator of NCCL was not freed and keeps its slot: %s", error)
            _unfreed_messages.extend(self._messages)
            return
        self._messages = []
        _slots.release()


class _NcclMessage:
    def __init__(self, channel: NcclChannel) -> None:
        self._channel = channel
        self._event: CompletionEvent | None = None

    def wait(self, seconds: float) -> None:
        """Raises LinkError after `seconds`, or when the peer is lost."""
        deadline = time.monotonic() + seconds
        while not self._is_done():
            _sleep_until(deadline, "the peer took no part in time")

    def _is_done(self) -> bool:
        # NCCL enqueues its kernel only when it has accepted the call.
        if self._channel.is_idle() and self._event is None:
            self._event = self._channel.record()
        return self._event is not None and self._event.query()


_slots = threading.BoundedSemaphore(MAX_COMMUNICATORS)
_unfreed_messages: list[torch.Tensor] = []
"""Buffers of communicators whose abort failed; as few as the slots, which they keep."""


def _reserve_communicator(api: NcclApi) -> None:
    """Take a slot, which `_end_communicator` returns. Raises LinkError."""
    free = api.get_free_bytes()
    needed = 2 * COMMUNICATOR_BYTES
    if free < needed:
        raise LinkError(
            f"NCCL needs {needed >> 20} MiB of free GPU memory and {free >> 20} MiB are free: "
            "lower --gpu-memory-utilization, or take nccl out of transports"
        )
    if not _slots.acquire(blocking=False):
        raise LinkError(f"{MAX_COMMUNICATORS} peers use NCCL already, and no more may")


def _exchange_id(store: Store, rank: int, api: NcclApi) -> bytes:
    """Return the id that rank 0 creates once rank 1 has reserved a communicator.

    The store's own time limit holds. Raises LinkError at rank 0 when rank 1 cannot use NCCL, which
    would else cost the producer's thread that whole limit.
    """
    if rank == 1:
        store.set(_CONSUMER_KEY, _JOINED)
    elif store.get(_CONSUMER_KEY).decode() == _REFUSED:
        raise LinkError("the consumer cannot use NCCL")
    else:
        store.set(_ID_KEY, api.create_id().hex())
    return bytes.fromhex(store.get(_ID_KEY).decode())


def _sleep_until(deadline: float, fault: str) -> None:
    if time.monotonic() > deadline:
        raise LinkError(fault)
    time.sleep(_POLL_S)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17, which later versions accept by `size` and `version`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21700
_UNDEFINED = -(2**31)
_MAX_CTAS = 2
"""Blocks of a kernel that waits for the peer: processors that the model does not get."""
_UINT8 = 1


class NcclLibrary:
    """The `NcclApi` of libnccl, for one channel, which has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Raises LinkError when the library is missing."""
        self._device = device
        try:
            self._library = ctypes.CDLL(_find_library())
        except OSError as error:
            raise LinkError(f"NCCL cannot be loaded: {error}") from error
        self._library.ncclCommInitRankConfig.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        )
        self._stream: torch.cuda.Stream
        """Of this channel alone, from `begin_init` to `abort`."""

    def create_id(self) -> bytes:
        """Return the id under which two ranks meet."""
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def begin_init(self, unique_id: bytes, rank: int) -> int:
        """Start to create a communicator."""
        communicator = ctypes.c_void_p()
        config = build_config()
        identity = _UniqueId.from_buffer_copy(unique_id)
        arguments = (ctypes.byref(communicator), 2, identity, rank, ctypes.byref(config))
        self._stream = create_stream(self._device)
        try:
            self._call("ncclCommInitRankConfig", *arguments)
        except LinkError:
            release_stream(self._stream)
            raise
        return communicator.value or 0

    def get_state(self, communicator: int) -> int:
        """Return the ncclResult_t of what was started last."""
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.c_void_p(communicator), ctypes.byref(state))
        return state.value

    def send(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        """Enqueue on the channel's stream."""
        self._transfer("ncclSend", communicator, message, peer)

    def receive(self, communicator: int, message: torch.Tensor, peer: int) -> None:
        """Enqueue on the channel's stream."""
        self._transfer("ncclRecv", communicator, message, peer)

    def record(self) -> torch.cuda.Event:
        """Return an event behind all that was enqueued."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def abort(self, communicator: int) -> None:
        """End its kernels, free it and the channel's stream; may take long."""
        self._call("ncclCommAbort", ctypes.c_void_p(communicator))
        release_stream(self._stream)

    def get_free_bytes(self) -> int:
        """Return the free memory of the GPU."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _transfer(self, name: str, communicator: int, message: torch.Tensor, peer: int) -> None:
        self._call(
            name,
            ctypes.c_void_p(message.data_ptr()),
            ctypes.c_size_t(message.numel()),
            _UINT8,
            peer,
            ctypes.c_void_p(communicator),
            ctypes.c_void_p(self._stream.cuda_stream),
        )

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            raise LinkError(f"{name} returned error {result}")


def build_config() -> _Config:
    """Return the configuration of a non-blocking communicator."""
    size, unset = ctypes.sizeof(_Config), _UNDEFINED
    return _Config(size, _CONFIG_MAGIC, _CONFIG_VERSION, 0, unset, unset, _MAX_CTAS, None)


def load_api(device: torch.device) -> NcclApi:
    """Return NCCL for one channel, with a stream of its own, see cuda_stream.py: neither copies nor
    kernels of other peers ever wait for this one. Raises LinkError when NCCL is missing."""
    return NcclLibrary(device)


def _find_library() -> str:
    """Return the libnccl of the wheel that torch uses, else the system's."""
    spec = importlib.util.find_spec("nvidia.nccl")
    for folder in spec.submodule_search_locations or () if spec else ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return "libnccl.so.2"
