"""Prometheus metrics of the instances that the gateway watches, beside its own.

Every gateway exports all instances, so queries take the maximum over gateways, never the sum. The
ports of engines are not fixed, so their load is scraped from the gateway instead.
"""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.router.instance import Connectivity, RoutedInstance
from cleave.router.registry import InstanceRegistry
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2


class InstanceCollector:
    """Reads the instances at each scrape."""

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        instances = list(self._registry.instances.values())
        yield _build_instances_gauge(instances)
        yield _build_requests_gauge(instances)
        yield _build_kv_usage_gauge(instances)


def _build_instances_gauge(instances: list[RoutedInstance]) -> Metric:
    """Also 0 for a role of which no instance is ready."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for instance in instances:
        model, role = _get_model_and_role(instance)
        counted[model, role, _get_state_label(instance)] += 1
        counted[model, role, "ready"] += 0
    return _build_gauge("instances", "Instances that this gateway knows", counted, "state")


def _build_requests_gauge(instances: list[RoutedInstance]) -> Metric:
    counted: Counter[tuple[str, str, str]] = Counter()
    for instance in instances:
        counted[*_get_model_and_role(instance), "running"] += instance.load.num_running
        counted[*_get_model_and_role(instance), "waiting"] += instance.load.num_waiting
    return _build_gauge("engine_requests", "Requests at engines, as they report", counted, "state")


def _build_kv_usage_gauge(instances: list[RoutedInstance]) -> Metric:
    fullest: dict[tuple[str, str], float] = {}
    for instance in instances:
        name = _get_model_and_role(instance)
        fullest[name] = max(fullest.get(name, 0.0), instance.load.kv_cache_usage)
    return _build_gauge(
        "engine_kv_usage_max", "KV memory in use at the fullest instance, 0 to 1", fullest
    )


def _build_gauge(
    name: str,
    text: str,
    values: "Counter[tuple[str, str, str]] | dict[tuple[str, str], float]",
    *labels: str,
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cleave_gateway_{name}", text, labels=["model", "role", *labels])
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _get_model_and_role(instance: RoutedInstance) -> tuple[str, str]:
    """(model, current role)."""
    registration = instance.registration
    return registration.model, get_enum_name(agent_pb2.Role, registration.role)


def _get_state_label(instance: RoutedInstance) -> str:
    if instance.connectivity in (Connectivity.FRESH, Connectivity.STALE):
        return get_enum_name(agent_pb2.State, instance.registration.state)
    return "unreachable"
