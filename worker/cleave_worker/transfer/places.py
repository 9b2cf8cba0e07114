"""Where the ranks of an owner serve, for a hand-off that was made before anybody could tell.

A gateway that has a prefill followed knows one address of the prefill engine: that of rank 0, which
knows the others and the engine's shape. It is asked once for each boot that it is.
"""

import threading
from collections import OrderedDict

import msgspec

from cleave_worker.transfer import wire
from cleave_worker.transfer.asking import dial, exchange
from cleave_worker.transfer.identity import HandOff, Reason, RefusedError

_MAX_BOOTS = 256
_Named = tuple[str, tuple[tuple[str, int], ...]]


class Places:
    """Boots with where their ranks are."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Named, wire.Located] = OrderedDict()
        self._lock = threading.Lock()

    def complete(self, hand_off: HandOff, seconds: float) -> HandOff:
        """The hand-off with all ranks of its owner; one of a finished prefill has them already.

        Each step of asking gets `seconds`. Raises RefusedError.
        """
        if not hand_off.ahead:
            return hand_off
        named = (hand_off.boot_id, hand_off.addresses)
        with self._lock:
            located = self._known.get(named)
        if located is None:
            located = _ask(hand_off, seconds)
            self._keep(named, located)
        return msgspec.structs.replace(hand_off, shape=located.shape, addresses=located.addresses)

    def _keep(self, named: _Named, located: wire.Located) -> None:
        with self._lock:
            self._known[named] = located
            while len(self._known) > _MAX_BOOTS:
                self._known.popitem(last=False)


def _ask(hand_off: HandOff, seconds: float) -> wire.Located:
    if not hand_off.addresses:
        raise RefusedError(Reason.LAYOUT, "the hand-off names no address")
    connection = dial(hand_off.addresses[0], seconds)
    try:
        return exchange(connection, wire.Locate(hand_off.boot_id), wire.Located, seconds)
    finally:
        connection.close()
