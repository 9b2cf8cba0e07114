"""The cores that a pod runs on: Kubernetes' static CPU manager policy as pure functions.

Called by the kubelet at admission. A pod whose CPU request and limit are the same integer gets
exclusive cores; all other pods share the remaining ones.
"""


class CoreShortageError(ValueError):
    """A pod requests more exclusive cores than are free."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} exclusive core(s) needed, {free} free")
        self.requested = requested
        self.free = free


def allocate_cores(free: frozenset[int], count: int) -> frozenset[int]:
    """The `count` lowest of the `free` cores. Raises CoreShortageError."""
    if count > len(free):
        raise CoreShortageError(count, len(free))
    return frozenset(sorted(free)[:count])


def get_shared_cores(all_cores: frozenset[int], exclusive: frozenset[int]) -> frozenset[int]:
    """The cores of pods without exclusive ones.

    Kubernetes reserves cores for them. A small machine may have none left, so when every core is
    exclusive they run on all cores: the gateway then competes with engines but still runs.
    """
    return all_cores - exclusive or all_cores
