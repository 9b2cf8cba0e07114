"""Decides which LoRA adapters a running engine loads and unloads, and under which names. Pure.

The operator orders the adapters of a deployment; the agent of each engine calls
`choose_next_step` until the engine has them. What is hard: KV of an adapter is cached and handed
over by its name, and must never be used for another source or content of that name. So engines know
an adapter by a name that contains a hash of both (`AdapterSource.engine_name`); old and new one are
loaded side by side for a while; each request names one of them to all of its engines.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

MAX_ADAPTERS = 128
"""Adapters of a deployment that are loaded at run time."""
MAX_NAME_CHARACTERS = 128
MAX_SOURCE_CHARACTERS = 1_024
NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
"""Pattern of names; without `@`, which separates the hash in the engine's name."""
SOURCE = r"^(/[^:\n]+|[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)$"
"""Pattern of sources: an absolute folder, or org/name of a repository of Hugging Face."""
ENV = "CLEAVE_ADAPTERS"
"""Variable with the adapters that a worker starts with, as `format_adapters` writes them."""
FIRST_RETRY_S = 1.0
"""Seconds from the first failure to load an adapter to the next attempt; they double each time."""
LONGEST_RETRY_S = 600.0


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter that engines are to have."""

    name: str
    """By which clients ask for it."""
    source: str
    """A folder of the worker, or org/name of a repository."""
    content: str = ""
    """Digest of what a worker has found there; empty: not known, and in orders."""

    @property
    def engine_name(self) -> str:
        """The name in the engine: each source of an adapter has its own, and each content of it."""
        text = f"{self.source}\n{self.content}" if self.content else self.source
        return f"{self.name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that an engine has, or could not load. Times are seconds of the caller's clock."""

    adapter: AdapterSource
    loaded_s: float | None = None
    """Since when the engine has it; None: it has it not."""
    withdrawn_s: float | None = None
    """Since when no new requests for it are accepted; None: they are."""
    num_failures: int = 0
    """Failed attempts to load it."""
    retry_s: float = 0.0
    """When the next attempt is due."""
    fault: str = ""
    """Why the last attempt failed."""


class StepKind(Enum):
    """What to do next."""

    LOAD = "load"
    WITHDRAW = "withdraw"
    """Announce that no new requests for it are accepted."""
    UNLOAD = "unload"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """The next step of an agent."""

    kind: StepKind
    adapter: AdapterSource | None = None
    """None: to wait."""
    wait_s: float | None = None
    """For how long to wait at most; None: until the orders change."""


def find_fault(adapters: Sequence[AdapterSource]) -> str:
    """Why these adapters cannot be ordered, one sentence; empty: they can."""
    if len(adapters) > MAX_ADAPTERS:
        return f"{len(adapters)} adapters: at most {MAX_ADAPTERS}"
    for each in adapters:
        if not re.fullmatch(NAME, each.name) or len(each.name) > MAX_NAME_CHARACTERS:
            return f"adapter name {each.name[:MAX_NAME_CHARACTERS]!r} does not match {NAME}"
        if not re.fullmatch(SOURCE, each.source) or len(each.source) > MAX_SOURCE_CHARACTERS:
            return f"source of adapter {each.name} must be an absolute folder or ORG/NAME"
    names = [each.name for each in adapters]
    repeated = next((name for name in names if names.count(name) > 1), "")
    return f"adapter {repeated} is named twice: one name has one source" if repeated else ""


def parse_adapters(text: str) -> tuple[AdapterSource, ...]:
    """Parse `format_adapters`. Raises ValueError."""
    try:
        adapters = tuple(AdapterSource(**each) for each in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"adapters must be a JSON list of {{name, source}}: {error}") from None
    if fault := find_fault(adapters):
        raise ValueError(fault)
    return adapters


def format_adapters(adapters: Collection[AdapterSource]) -> str:
    """Return the adapters as JSON, for the environment of a worker."""
    return json.dumps([{"name": each.name, "source": each.source} for each in adapters])


def hash_adapters(adapters: Collection[AdapterSource]) -> str:
    """Return a digest of the adapters that agents are to have, in any order; empty for none."""
    if not adapters:
        return ""
    pairs = sorted((each.name, each.source) for each in adapters)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def add_contents(
    adapters: Iterable[AdapterSource], contents: Mapping[str, str]
) -> list[AdapterSource]:
    """Return the adapters with what a worker has found at their sources."""
    return [replace(each, content=contents.get(each.source, "")) for each in adapters]


def compute_retry_delay(num_failures: int) -> float:
    """Return the seconds to the next attempt to load an adapter after so many failed in a row."""
    return min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 30), LONGEST_RETRY_S)


def choose_next_step(
    ordered: Sequence[AdapterSource],
    states: Mapping[str, AdapterState],
    now_s: float,
    *,
    overlap_s: float,
    linger_s: float,
) -> AdapterStep:
    """Choose what brings an engine closer to the ordered adapters.

    `states`: by engine name. A source that is replaced takes requests until the new one has been
    loaded for `overlap_s`, in which other engines load it, too. An adapter is unloaded `linger_s`
    after it was withdrawn: requests that were under way to the engine have arrived by then, and an
    engine finishes those that it has.
    """
    by_name = {each.name: each for each in ordered}
    kept = {each.engine_name for each in ordered}
    waits_s: list[float] = []
    leaving: list[AdapterSource] = []
    for engine_name, state in states.items():
        if engine_name in kept or state.loaded_s is None:
            continue
        if state.withdrawn_s is not None:
            rest_s = state.withdrawn_s + linger_s - now_s
            if rest_s <= 0:
                leaving.append(state.adapter)
            else:
                waits_s.append(rest_s)
            continue
        successor = by_name.get(state.adapter.name)
        overlap_left_s = _measure_overlap(successor, states, now_s, overlap_s)
        if overlap_left_s is None:
            continue
        if overlap_left_s <= 0:
            return AdapterStep(StepKind.WITHDRAW, state.adapter)
        waits_s.append(overlap_left_s)
    for each in ordered:
        known = states.get(each.engine_name)
        if known is not None and known.loaded_s is not None:
            continue
        if known is None or now_s >= known.retry_s:
            return AdapterStep(StepKind.LOAD, each)
        waits_s.append(known.retry_s - now_s)
    if leaving:
        return AdapterStep(StepKind.UNLOAD, leaving[0])
    return AdapterStep(StepKind.WAIT, wait_s=min(waits_s, default=None))


def _measure_overlap(
    successor: AdapterSource | None,
    states: Mapping[str, AdapterState],
    now_s: float,
    overlap_s: float,
) -> float | None:
    """Seconds for which a source that is no longer ordered still takes requests; None: as long as
    its successor is not loaded."""
    if successor is None:
        return 0.0
    state = states.get(successor.engine_name)
    if state is None or state.loaded_s is None:
        return None
    return state.loaded_s + overlap_s - now_s
