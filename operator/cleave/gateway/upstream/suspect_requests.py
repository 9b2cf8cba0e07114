"""Requests that end the engines which run them. No I/O.

Used by the proxied requests of a gateway process. vLLM has had requests that end its process
(CVE-2025-48942, CVE-2025-62372 and others); each retry would take one more engine out of service. A
request is a suspect when two engines ended while they had just begun to work on it. It gets 502,
and so does the same request for some minutes. `suspect_senders` confines the sender.

What is hard: a connection also breaks when only the network does, and other requests run on an
engine that ends. So an engine counts only once its agent has reported the end of its process, and
only for requests that had generated nothing there, or begun a moment before. Data-parallel ranks
end together: those of one instance count as one engine.
"""

import enum
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from cleave.gateway.http.completion_request import CompletionRequest
from cleave.router.registry import InstanceRegistry
from cleave.rpc.v1 import agent_pb2

RECENT_S = 10.0
"""An engine that ends so soon after a request has come may have ended because of it, even if the
request has generated tokens there."""
REPORT_S = 1.0
"""How long a retry waits for the agents' reports after a second broken connection."""
MEMORY_S = 300.0
"""How long a suspect is refused."""
MAX_REMEMBERED = 1_024
_SAMPLES = 512
_SAMPLE_BYTES = 1_024
"""Of a larger body, so many parts of this size go into its digest, which then takes half a
millisecond. Requests of one shape that differ between them only count as the same."""
TOLERATED_ENGINES = 1
"""Engines end for other reasons, too."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An engine failed while it worked on a request that may be the cause."""

    instance: str
    boot_id: str
    is_broken: bool
    """The connection broke; otherwise the engine sent an error, as vLLM does before it exits."""


class Suspicion(enum.Enum):
    """Whether a request is the cause of its failures."""

    NONE = "none"
    OPEN = "open"
    """Agents may still report."""
    SUSPECT = "suspect"


def assess_failures(
    failures: Collection[EngineFailure],
    registry: InstanceRegistry,
    age_s: float,
    tolerated: int = TOLERATED_ENGINES,
) -> Suspicion:
    """Assess the failures of one request; `age_s`: seconds since the latest one; `tolerated`: how
    many engines may have ended without suspicion."""
    if len(failures) <= tolerated:
        return Suspicion.NONE
    ended = [each for each in failures if _has_ended(each, registry)]
    if _count_engines(ended, registry) > tolerated:
        return Suspicion.SUSPECT
    possible = _count_engines([e for e in failures if e.is_broken or e in ended], registry)
    return Suspicion.OPEN if possible > tolerated and age_s < REPORT_S else Suspicion.NONE


def _count_engines(failures: Collection[EngineFailure], registry: InstanceRegistry) -> int:
    """Engines that failed; of the ranks of one instance those of the rank that failed most often,
    as one death ends all."""
    by_rank = Counter(each.instance for each in failures)
    by_instance: dict[str, int] = {}
    for name, count in by_rank.items():
        instance = registry.instances.get(name)
        whole = name if instance is None else instance.whole
        by_instance[whole] = max(by_instance.get(whole, 0), count)
    return sum(by_instance.values())


def _has_ended(failure: EngineFailure, registry: InstanceRegistry) -> bool:
    """Whether the agent has reported that this boot's process is gone."""
    instance = registry.instances.get(failure.instance)
    if instance is None:
        return False
    registration = instance.registration
    is_same_boot = registration.boot_id == failure.boot_id
    return not is_same_boot or registration.state == agent_pb2.STATE_STARTING


class SuspectRequests:
    """Remembers suspects by digest. Their number is bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self.shapes: set[tuple[bytes, str, int, int]] = set()
        """Of the remembered requests. A request of another shape needs no digest; mostly empty."""
        self._entries: OrderedDict[bytes, tuple[float, tuple[bytes, str, int, int]]] = OrderedDict()
        """By digest: when it is forgotten, and its shape. Oldest first."""

    def add(self, path: bytes, completion: CompletionRequest, now: float) -> None:
        """Refuse this request from now on."""
        digest = _compute_digest(path, completion)
        self._entries[digest] = now + MEMORY_S, _get_shape(path, completion)
        self._entries.move_to_end(digest)
        if len(self._entries) > MAX_REMEMBERED:
            self._entries.popitem(last=False)
        self._update_shapes()

    def contains(self, path: bytes, completion: CompletionRequest) -> bool:
        """Whether this request is remembered."""
        if _get_shape(path, completion) not in self.shapes:
            return False
        return _compute_digest(path, completion) in self._entries

    def expire(self, now: float) -> None:
        """Forget old entries; called by the sweeper."""
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
            self._update_shapes()

    def _update_shapes(self) -> None:
        self.shapes = {shape for _, shape in self._entries.values()}


def _get_shape(path: bytes, completion: CompletionRequest) -> tuple[bytes, str, int, int]:
    """What equal requests have in common and is known without reading them again."""
    return path, completion.model, completion.prompt_tokens, len(completion.fields)


def _compute_digest(path: bytes, completion: CompletionRequest) -> bytes:
    digest = hashlib.blake2b(path, digest_size=16)
    fields = completion.fields
    step = max(_SAMPLE_BYTES, sum(map(len, fields.values())) // _SAMPLES)
    for key in sorted(fields):
        value = memoryview(fields[key])
        digest.update(b"%d %b %d " % (len(key), key.encode(), len(value)))
        for start in range(0, len(value), step):
            digest.update(value[start : start + _SAMPLE_BYTES])
        digest.update(value[-_SAMPLE_BYTES:])
    return digest.digest()
