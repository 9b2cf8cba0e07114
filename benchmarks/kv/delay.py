"""A line between two networks with a configured delay: `delay.py PID MS`.

Started by cable.py where a cable shall have a latency; this kernel's own delay (netem) is often not
built in. Makes a card (tun) in its network and one in that of process PID, and passes packets on,
each after half of the round trip. Large packets, for each costs some 50 us.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 65_000
MOST = 4_096
"""Packets under way in one direction; what comes then is lost, as on any line."""


def main() -> None:
    """Both directions, until it is killed."""
    keeper, rtt_ms, card, peer_card = sys.argv[1:]
    here = open_card(card)
    with Path(f"/proc/{keeper}/ns/net").open() as network:
        system = ctypes.CDLL(None, use_errno=True)
        if system.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no way into the other network")
    peer = open_card(peer_card)
    print(flush=True)
    seconds = float(rtt_ms) / 2e3
    threading.Thread(target=pass_on, args=(here, peer, seconds), daemon=True).start()
    pass_on(peer, here, seconds)


def open_card(name: str) -> int:
    """A card of the network that this thread is in."""
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return card


def pass_on(source: int, target: int, seconds: float) -> None:
    """Each packet, in order, when its time has come."""
    coming: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, coming[0][0] - time.monotonic()) if coming else None
        if select.select([source], [], [], wait)[0]:
            packet = os.read(source, MTU)
            if len(coming) < MOST:
                coming.append((time.monotonic() + seconds, packet))
        while coming and coming[0][0] <= time.monotonic():
            try:
                os.write(target, coming.popleft()[1])
            except OSError:
                continue  # The card is down, or has no room.


if __name__ == "__main__":
    main()
