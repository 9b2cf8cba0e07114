"""Prometheus metrics of the instances that the gateway watches, beside its own.

Every gateway exports all instances, so queries take the maximum over gateways, never the sum, but
for what a gateway has sent itself. The ports of engines are not fixed, so their load is scraped
from the gateway instead.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.router.instance import Connectivity, RoutedInstance
from cleave.router.pair_summary import summarize_pairs
from cleave.router.registry import InstanceRegistry
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2


class InstanceCollector:
    """Reads the instances at each scrape."""

    def __init__(self, registry: InstanceRegistry, *, reports_hits: bool) -> None:
        """`reports_hits`: whether the dispatch policy predicts hits. Five series of each instance
        make a page of 1,000 instances ten times as expensive, in the loop that serves."""
        self._registry = registry
        self._reports_hits = reports_hits

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        states: Counter[tuple[str, ...]] = Counter()
        requests: Counter[tuple[str, ...]] = Counter()
        fullest: dict[tuple[str, ...], float] = {}
        for instance in self._registry.instances.values():
            registration, load = instance.registration, instance.load
            key = registration.model, get_enum_name(agent_pb2.Role, registration.role)
            states[*key, _get_state_label(instance)] += 1
            # Also for a role of which no instance is ready.
            states[*key, "ready"] += 0
            requests[*key, "running"] += load.num_running
            requests[*key, "waiting"] += load.num_waiting
            fullest[key] = max(fullest.get(key, 0.0), load.kv_cache_usage)
        yield _build_gauge("instances", "Instances that this gateway knows", states, "state")
        text = "Requests at engines, as they report"
        yield _build_gauge("engine_requests", text, requests, "state")
        text = "KV memory in use at the fullest instance, 0 to 1"
        yield _build_gauge("engine_kv_usage_max", text, fullest)
        if self._reports_hits:
            yield from self._collect_hits()
        yield from self._collect_pairs()

    def _collect_hits(self) -> Iterable[Metric]:
        """What engines were expected to have cached of prompts, and what they had, by instance."""
        labels = ("model", "engine", "source")
        prompts = CounterMetricFamily(
            "cleave_gateway_cache_prompt_tokens",
            "Prompt tokens since the engine started: computed for this gateway (source `sent`),"
            " in prompts of these that it looked up (`predicted`), looked up by the engine"
            " (`engine`)",
            labels=labels,
        )
        cached = CounterMetricFamily(
            "cleave_gateway_cache_hit_tokens", "Those of them that were cached", labels=labels
        )
        for instance in self._registry.instances.values():
            registration, load = instance.registration, instance.load
            sent, looked_up, predicted_cached = instance.in_flight.predict_hits()
            # Not by role: after a flip the counts go on.
            key = registration.model, instance.name
            prompts.add_metric([*key, "sent"], sent)
            prompts.add_metric([*key, "predicted"], looked_up)
            cached.add_metric([*key, "predicted"], predicted_cached)
            if load.HasField("prefix_cache_queries"):
                prompts.add_metric([*key, "engine"], load.prefix_cache_queries)
                cached.add_metric([*key, "engine"], load.prefix_cache_hits)
        yield prompts
        yield cached

    def _collect_pairs(self) -> Iterable[Metric]:
        """What canary handoffs have shown, by model."""
        pairs, age = "cleave_gateway_kv_pairs", "cleave_gateway_kv_proof_age_seconds_max"
        rate = "cleave_gateway_kv_pair_bytes_per_second_min"
        states: Counter[tuple[str, str]] = Counter()
        oldest_s: dict[str, float] = {}
        slowest: dict[str, float] = {}
        for table in self._registry.list_tables():
            model, now = table.instances[0].registration.model, self._registry.latest_s
            for _, summary in summarize_pairs(table):
                proven, closed = len(summary.proven), len(summary.closed)
                states[model, "proven"] += proven
                states[model, "closed"] += closed
                states[model, "unproven"] += summary.total - proven - closed
                oldest_s[model] = max(oldest_s.get(model, 0.0), summary.get_oldest_age_s(now))
                if (path := summary.find_slowest()) is not None:
                    slowest[model] = min(slowest.get(model, path.bytes_per_s), path.bytes_per_s)
        text = "Pairs of a prefill and a decode instance, by what canary handoffs have shown"
        family = GaugeMetricFamily(pairs, text, labels=["model", "state"])
        for key, count in states.items():
            family.add_metric(key, count)
        yield family
        for name, text, values in (
            (age, "Age of the oldest proof of a pair", oldest_s),
            (rate, "KV transfer rate of the slowest proven pair", slowest),
        ):
            family = GaugeMetricFamily(name, text, labels=["model"])
            for model, value in values.items():
                family.add_metric([model], value)
            yield family


def _build_gauge(
    name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cleave_gateway_{name}", text, labels=["model", "role", *labels])
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _get_state_label(instance: RoutedInstance) -> str:
    if instance.connectivity in (Connectivity.FRESH, Connectivity.STALE):
        return get_enum_name(agent_pb2.State, instance.registration.state)
    return "unreachable"
