"""Which cores a pod runs on: Kubernetes' static CPU policy as pure functions.

Called by the kubelet at admission. A pod with whole, equal request and limit gets cores of its
own; all others share what is left.
"""


class CoreShortageError(ValueError):
    """More exclusive cores are asked for than are free."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} exclusive core(s) needed, {free} free")
        self.wanted = wanted
        self.free = free


def allocate(free: frozenset[int], count: int) -> frozenset[int]:
    """The `count` lowest of the `free` cores. Raises CoreShortageError."""
    if count > len(free):
        raise CoreShortageError(count, len(free))
    return frozenset(sorted(free)[:count])


def shared(all_cores: frozenset[int], exclusive: frozenset[int]) -> frozenset[int]:
    """Cores of the pods that own none.

    Kubernetes reserves some for them. A laptop may have none to spare, so when every core is
    owned they run anywhere: the gateway then competes with engines instead of not running.
    """
    return all_cores - exclusive or all_cores
