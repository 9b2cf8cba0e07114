"""Which models and adapters a fleet serves, by the name that clients request.

Built by the registry from its instances whenever these change what they serve.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from cleave.policy.session_affinity import to_key
from cleave.router.instance import RoutedInstance
from cleave.router.runtime_adapters import AdapterPlacement, choose_placements
from cleave.router.score_table import ScoreTable
from cleave.rpc.v1 import agent_pb2


@dataclasses.dataclass(slots=True)
class ServedModel:
    """A model or adapter with its score tables, one per deployment and revision."""

    score_tables: list[ScoreTable]
    instances: list[RoutedInstance]
    base: str = ""
    """Model of which this is an adapter or a further name; empty: it is neither."""
    adapter: int | None = None
    """Key of an adapter; None: this is not an adapter."""
    is_crowded: bool = False
    """Whether instances serve more adapters than they can hold in memory at a time."""
    engine_name: str = ""
    """By which engines know an adapter that was loaded at run time, or a model by a further name;
    empty: by the name that clients request."""
    lacking: frozenset[str] = frozenset()
    """Instances in the score tables that have not loaded the adapter: they get none of its
    requests."""


def build_models(
    instances: Sequence[RoutedInstance], build_table: Callable[[list[RoutedInstance]], ScoreTable]
) -> tuple[dict[str, ServedModel], frozenset[str]]:
    """(what the instances serve, adapters that were ordered and that none of them has loaded yet).
    `instances`: in the order that they have in tables."""
    groups: dict[tuple[str, str, str], list[RoutedInstance]] = defaultdict(list)
    for instance in instances:
        registration = instance.registration
        key = registration.model, registration.deployment, registration.revision
        groups[key].append(instance)
    adapters: dict[str, list[tuple[str, ScoreTable]]] = defaultdict(list)
    models: dict[str, ServedModel] = {}
    for (model, _, _), members in sorted(groups.items()):
        table = build_table(members)
        served = models.setdefault(model, ServedModel([], []))
        served.score_tables.append(table)
        served.instances.extend(members)
        for name in _list_adapters(members):
            adapters[name].append((model, table))
    for name, tables in adapters.items():
        if name not in models:
            score_tables = [table for _, table in tables]
            members = [instance for table in score_tables for instance in table.instances]
            crowded = any(map(_is_crowded, members))
            models[name] = ServedModel(score_tables, members, tables[0][0], to_key(name), crowded)
    return models, _add_runtime_adapters(models)


def add_aliases(models: dict[str, ServedModel], names: Sequence[str]) -> None:
    """Add the model that has the first of these names by the others. What engines themselves have
    by such a name stays: while a deployment's model is renamed, its former name may be both."""
    if names and (served := models.get(names[0])) is not None and not served.base:
        for alias in names[1:]:
            further = ServedModel(
                served.score_tables, served.instances, names[0], engine_name=names[0]
            )
            models.setdefault(alias, further)


def _add_runtime_adapters(models: dict[str, ServedModel]) -> frozenset[str]:
    """Add the adapters that engines have loaded since their start, below their models; returns
    those that none has loaded."""
    pending: set[str] = set()
    for model, base in list(models.items()):
        if base.base:
            continue
        found = choose_placements(base.instances)
        pending |= found.pending
        for name, placement in found.placements.items():
            if name not in models:
                models[name] = _build_adapter(name, model, base, placement)
    return frozenset(pending - models.keys())


def _build_adapter(
    name: str, model: str, base: ServedModel, placement: AdapterPlacement
) -> ServedModel:
    """The adapter with the score tables that have an instance with it."""
    tables = [
        table
        for table in base.score_tables
        if any(each.name in placement.instances for each in table.instances)
    ]
    members = [instance for table in tables for instance in table.instances]
    return ServedModel(
        tables,
        members,
        model,
        to_key(name),
        any(map(_is_crowded, members)),
        placement.engine_name,
        frozenset(each.name for each in members) - placement.instances,
    )


def get_group(registration: agent_pb2.Registration) -> tuple[object, ...]:
    """What decides which tables an instance is in, and which models and adapters they serve."""
    return (
        registration.model,
        registration.deployment,
        registration.revision,
        registration.cell,
        list(registration.adapters),
        list(registration.runtime_adapters),
        registration.max_adapters,
        registration.state == agent_pb2.STATE_STARTING,
    )


def _list_adapters(instances: Collection[RoutedInstance]) -> Collection[str]:
    """Adapters that all instances serve, ignoring those that do not know their adapters yet."""
    common: set[str] | None = None
    for each in filter(knows_adapters, instances):
        adapters = each.registration.adapters
        common = set(adapters) if common is None else common.intersection(adapters)
        if not common:
            break
    return sorted(common or ())


def _is_crowded(instance: RoutedInstance) -> bool:
    registration = instance.registration
    count = len(registration.adapters) + len(registration.runtime_adapters)
    return count > registration.max_adapters


def knows_adapters(instance: RoutedInstance) -> bool:
    """Whether its engine has started, or had started before a restart and reported adapters."""
    registration = instance.registration
    return registration.state != agent_pb2.STATE_STARTING or bool(registration.adapters)
