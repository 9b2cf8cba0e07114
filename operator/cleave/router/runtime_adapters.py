"""Chooses which source of each adapter that is loaded at run time serves requests, and where. Pure.

Called by the registry when an instance changes. Instances load a changed source one after another,
and KV of one source must not be continued with another: so all requests of a name go to one source,
on both sides of a pair. All gateways choose the same one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cleave.router.instance import RoutedInstance


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """Where an adapter is served."""

    engine_name: str
    """By which engines know the chosen source."""
    instances: frozenset[str]
    """Names of the instances that have loaded it."""


@dataclass(frozen=True, slots=True)
class RuntimeAdapters:
    """The adapters of the instances of one model."""

    placements: Mapping[str, AdapterPlacement]
    """By name."""
    pending: frozenset[str]
    """Names that were ordered, but that no instance has loaded so far."""


def choose_placements(instances: Sequence[RoutedInstance]) -> RuntimeAdapters:
    """Choose for each name the source that most instances can serve; the newest of several that
    equally many can."""
    pending: set[str] = set()
    loaded: dict[str, dict[str, list[RoutedInstance]]] = defaultdict(lambda: defaultdict(list))
    generations: dict[str, int] = {}
    for instance in instances:
        # Most have none, and are looked at again whenever one comes or goes.
        for each in instance.registration.runtime_adapters or ():
            if not each.loaded:
                pending.add(each.name)
                continue
            loaded[each.name][each.engine_name].append(instance)
            newest = generations.get(each.engine_name, 0)
            generations[each.engine_name] = max(newest, each.generation)
    placements = {}
    for name, sources in loaded.items():
        chosen = max(sources, key=lambda s: (_count_open(sources[s]), generations[s], s))
        holders = frozenset(instance.name for instance in sources[chosen])
        placements[name] = AdapterPlacement(chosen, holders)
    return RuntimeAdapters(placements, frozenset(pending - placements.keys()))


def _count_open(instances: Iterable[RoutedInstance]) -> int:
    return sum(instance.selectable for instance in instances)
