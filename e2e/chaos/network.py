"""Cuts between processes of this machine, in namespaces of this run's own.

A cut is a routing rule that swallows all packets of one server port: established connections fall
silent and new ones are never answered, as when a cable is pulled. `scripts/isolated` makes the
namespace; without one nothing is cut, lest the machine's own network is.
"""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ISOLATED = Path(__file__).parents[2] / "scripts" / "isolated"
MARK = "CLEAVE_CHAOS_ISOLATED"
_LOCAL = "32000"
"""Where the kernel's table of own addresses goes; it comes first otherwise."""
_numbers = itertools.count(50)


def isolate() -> None:
    """Run this program again with a network and mounts of its own, if this user may make them."""
    if MARK in os.environ:
        return
    command = [str(ISOLATED), "unshare", "--mount"]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    if tried.returncode == 0:
        os.execve(ISOLATED, [*command, *sys.orig_argv], os.environ | {MARK: "1"})


def can_cut() -> bool:
    """Whether cuts are possible here; prepares for them."""
    if MARK not in os.environ:
        return False
    if _LOCAL not in subprocess.run(["ip", "rule"], capture_output=True, text=True).stdout:
        _rule("add", "pref", _LOCAL, "lookup", "local")
        _rule("del", "pref", "0")
    return True


@dataclass(frozen=True)
class Cut:
    """Of one server's port."""

    host: str
    port: int
    one_way: bool
    """What it is sent still reaches it, only its answers do not come back."""
    number: int = field(default_factory=_numbers.__next__)
    """Its rules': cuts of the same port may overlap."""

    def make(self) -> None:
        for rule in self._rules():
            _rule("add", *rule)

    def mend(self) -> None:
        for rule in self._rules():
            _rule("del", *rule)

    def _rules(self) -> list[list[str]]:
        common, port = ["pref", str(self.number), "ipproto", "tcp"], str(self.port)
        rules = [[*common, "from", self.host, "sport", port, "blackhole"]]
        if not self.one_way:
            rules.append([*common, "to", self.host, "dport", port, "blackhole"])
        return rules


def _rule(*words: str) -> None:
    subprocess.run(["ip", "rule", *words], check=True, capture_output=True)
