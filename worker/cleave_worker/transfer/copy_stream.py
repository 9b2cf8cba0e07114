"""The CUDA stream on which a thread of this package copies KV; nothing to do on the host.

Called by the threads of `KvServer` and `WorkerSide`. A new thread has device 0 and the default
stream, also on rank 3, and the model may run on that stream: a copy there would queue behind whole
steps. Copies are asynchronous, so a thread must wait before it reports KV or reuses a buffer.

torch has 32 streams per GPU and hands them out in turn: beyond them threads share streams. So a
thread that may never copy selects its device only, and a stream when it copies first.
"""

import torch


def select_device(device: torch.device) -> None:
    """Give the calling thread this device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def select_copy_stream(device: torch.device) -> None:
    """Give the calling thread this device, and a stream beside the default one for all that it
    enqueues; a thread that has one keeps it."""
    if device.type != "cuda":
        return
    select_device(device)
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what the thread has enqueued; None on the host, where nothing waits.

    Waiting for it sleeps: an event without `blocking` keeps a core busy, and a pod has few.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def wait_for_copies(device: torch.device) -> None:
    """Block until all that the thread has enqueued is done."""
    if (event := record_event(device)) is not None:
        event.synchronize()
