"""A link of a configured rate between two networks of this machine, both apart from its own.

Used by shaped.py. A pair of virtual cards joins them and the kernel's token bucket (tbf)
holds each to the rate. As root or, where allowed, in a user namespace.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from delay import MTU
from pair import Place

ISOLATED = Path(__file__).parents[2] / "scripts" / "isolated"
MARK = "CLEAVE_KV_SHAPED"
CARD, PEER_CARD = "kv-d", "kv-p"
HOST, PEER_HOST = "10.79.0.1", "10.79.0.2"
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
SEE_OWN_CARDS = ("mount", "-t", "sysfs", "sysfs", "/sys")
"""NIXL looks for cards there, and what is mounted shows those of whoever has mounted it."""
BURST_S = 0.001
"""What the bucket may hold, as time at the full rate; the kernel's cards take 64 KiB at once."""


def leave_own_network() -> None:
    """Begin this program again, once, in a network of its own."""
    if MARK in os.environ:
        return
    # Names of hosts are not known there, and torch would say so for each connection.
    os.environ |= {MARK: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    within = f'{" ".join(SEE_OWN_CARDS)}; exec "$@"'
    shell = ["unshare", "--mount", "sh", "-euc", within, "shaped"]
    os.execv(ISOLATED, [str(ISOLATED), *shell, sys.executable, *sys.argv])


@dataclass(frozen=True, slots=True)
class Cable:
    """A pair of cards between this network and another one, which a process keeps."""

    keeper: int
    rtt_ms: float = 0.0

    @property
    def place(self) -> Place:
        """The owner beyond it."""
        return Place(PEER_HOST, HOST, partial(enter, self.keeper))

    @property
    def ends(self) -> tuple[tuple[tuple[str, ...], str, str], ...]:
        """How to work there, card and address."""
        in_namespace = ("nsenter", "--net", "--target", str(self.keeper))
        return ((), CARD, HOST), (in_namespace, PEER_CARD, PEER_HOST)

    def lay(self, begun: ExitStack) -> None:
        """Make the cards. They stay for all pairs: NIXL remembers them."""
        if self.rtt_ms:
            begun.enter_context(delaying(self.keeper, self.rtt_ms))
        else:
            call("ip", "link", "add", CARD, "type", "veth", "peer", "name", PEER_CARD)
            call("ip", "link", "set", PEER_CARD, "netns", str(self.keeper))
        for within, card, host in self.ends:
            call(*within, "ip", "addr", "add", f"{host}/24", "dev", card)
            mtu = ("mtu", str(MTU)) if self.rtt_ms else ()
            call(*within, "ip", "link", "set", card, *mtu, "up")

    def hold_to(self, gbps: float) -> None:
        """Shape what either end sends."""
        burst = max(1 << 17, int(gbps * 1e9 / 8 * BURST_S))
        shape = f"tbf rate {gbps}gbit burst {burst} latency 50ms".split()
        for within, card, _ in self.ends:
            call(*within, *("tc", "qdisc", "replace", "dev", card, "root"), *shape)


@contextmanager
def laid(rtt_ms: float = 0.0) -> Iterator[Cable]:
    """A cable until the end."""
    with ExitStack() as begun:
        keeper = begun.enter_context(
            saying("unshare", "--net", "sh", "-c", "ip link set lo up; echo; exec cat")
        )
        cable = Cable(keeper, rtt_ms)
        cable.lay(begun)
        use_tcp(CARD)
        yield cable


def delaying(keeper: int, rtt_ms: float) -> AbstractContextManager[int]:
    """A line that takes its time, in a process of its own."""
    program = str(Path(__file__).with_name("delay.py"))
    return saying(sys.executable, program, str(keeper), str(rtt_ms), CARD, PEER_CARD)


@contextmanager
def saying(*command: str) -> Iterator[int]:
    """A process, from its first line on."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline(), f"{command[0]} has ended"
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=60)


def enter(keeper: int) -> None:
    """The owner's process: into the other network."""
    system = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{keeper}/ns/net").open() as network:
        if system.setns(network.fileno(), CLONE_NEWNET) or system.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "the owner of KV cannot have the other network")
    call(*SEE_OWN_CARDS)
    use_tcp(PEER_CARD)


def use_tcp(card: str) -> None:
    """NIXL would find shared memory: both processes are on one host."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": card}


def crossed() -> int:
    """Bytes that this end's card has sent and received."""
    (link_state,) = json.loads(call("ip", "-s", "-j", "link", "show", "dev", CARD))
    sides = link_state["stats64"]
    total: int = sides["rx"]["bytes"] + sides["tx"]["bytes"]
    return total


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout
