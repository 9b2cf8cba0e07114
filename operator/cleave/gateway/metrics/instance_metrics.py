"""Prometheus metrics of the instances that the gateway watches, beside its own.

Every gateway exports all instances, so queries take the maximum over gateways, never the sum. The
ports of engines are not fixed, so their load is scraped from the gateway instead.
"""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.router.instance import Contact, Instance
from cleave.router.registry import Directory
from cleave.rpc.enum_names import name_of
from cleave.rpc.v1 import agent_pb2


class FleetCollector:
    """Reads the instances at each scrape."""

    def __init__(self, registry: Directory) -> None:
        self._directory = registry

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        instances = list(self._directory.instances.values())
        yield _count_instances(instances)
        yield _count_requests(instances)
        yield _find_fullest(instances)


def _count_instances(instances: list[Instance]) -> Metric:
    """Also 0 for a role of which no instance is ready."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for instance in instances:
        model, role = _name(instance)
        counted[model, role, _find_state(instance)] += 1
        counted[model, role, "ready"] += 0
    return _gauge("instances", "Instances that this gateway knows", counted, "state")


def _count_requests(instances: list[Instance]) -> Metric:
    counted: Counter[tuple[str, str, str]] = Counter()
    for instance in instances:
        counted[*_name(instance), "running"] += instance.load.num_running
        counted[*_name(instance), "waiting"] += instance.load.num_waiting
    return _gauge("engine_requests", "Requests at engines, as they report", counted, "state")


def _find_fullest(instances: list[Instance]) -> Metric:
    fullest: dict[tuple[str, str], float] = {}
    for instance in instances:
        name = _name(instance)
        fullest[name] = max(fullest.get(name, 0.0), instance.load.kv_cache_usage)
    return _gauge(
        "engine_kv_usage_max", "KV memory in use at the fullest instance, 0 to 1", fullest
    )


def _gauge(
    name: str,
    text: str,
    values: "Counter[tuple[str, str, str]] | dict[tuple[str, str], float]",
    *labels: str,
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cleave_gateway_{name}", text, labels=["model", "role", *labels])
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _name(instance: Instance) -> tuple[str, str]:
    """(model, current role)."""
    registration = instance.registration
    return registration.model, name_of(agent_pb2.Role, registration.role)


def _find_state(instance: Instance) -> str:
    if instance.contact in (Contact.HEARD, Contact.STALE):
        return name_of(agent_pb2.State, instance.registration.state)
    return "unreachable"
