"""Prometheus metrics of the instances that the gateway watches, beside its own.

Every gateway exports all instances, so queries take the maximum over gateways, never the sum, but
for what a gateway has sent itself. The ports of engines are not fixed, so their load is scraped
from the gateway instead.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.router.instance import Connectivity, RoutedInstance, count_engine_hits
from cleave.router.pair_summary import summarize_pairs
from cleave.router.registry import InstanceRegistry
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2

PROMPT_TOKENS = (
    "cleave_gateway_cache_prompt_tokens_total",
    (
        "Prompt tokens since the engine started: computed for this gateway (source `sent`), in"
        " prompts of these that it looked up (`predicted`), looked up by the engine (`engine`)"
    ),
)
HIT_TOKENS = "cleave_gateway_cache_hit_tokens_total", "Those of them that were cached"
HOST_HIT_TOKENS = (
    "cleave_gateway_cache_host_hit_tokens_total",
    "Those of these that were in host memory only, of engines that keep KV there",
)
"""Name and text of the metrics of `CacheHitPage`."""
HIT_LABELS = ("model", "engine", "source")


class InstanceCollector:
    """Reads the instances at each scrape."""

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        states: Counter[tuple[str, ...]] = Counter()
        requests: Counter[tuple[str, ...]] = Counter()
        fullest: dict[tuple[str, ...], float] = {}
        youngest_s: dict[tuple[str, ...], float] = {}
        for instance in self._registry.instances.values():
            registration, load = instance.registration, instance.load
            key = registration.model, get_enum_name(agent_pb2.Role, registration.role)
            states[*key, _get_state_label(instance)] += 1
            # Also for a role of which no instance is ready.
            states[*key, "ready"] += 0
            requests[*key, "running"] += load.num_running
            requests[*key, "waiting"] += load.num_waiting
            fullest[key] = max(fullest.get(key, 0.0), load.kv_cache_usage)
            if load.oldest_kv_ms:
                age_s = load.oldest_kv_ms / 1_000
                youngest_s[key] = min(youngest_s.get(key, age_s), age_s)
        yield _build_gauge("instances", "Instances that this gateway knows", states, "state")
        text = "Requests at engines, as they report"
        yield _build_gauge("engine_requests", text, requests, "state")
        text = "KV memory in use at the fullest instance, 0 to 1"
        yield _build_gauge("engine_kv_usage_max", text, fullest)
        text = (
            "Least age of an instance's least recently used KV block, of those that report it: what"
            " was used since is cached"
        )
        yield _build_gauge("engine_kv_age_seconds_min", text, youngest_s)
        yield from self._collect_pairs()

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


class CacheHitPage:
    """What engines were expected to have cached of prompts, and what they had, by instance.

    Lines of the text format, appended to the page of the other metrics. There are five for each
    instance, seven if it has host memory for KV, and prometheus_client takes 7 us for one, in the
    loop that serves. So labels are formatted once per instance, not at each scrape.
    """

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry
        self._labels: dict[tuple[str, str], tuple[str, ...]] = {}
        """Beginnings of the lines by model and name, of the instances of the last scrape."""

    def render(self) -> bytes:
        """Called at each scrape."""
        prompts, cached = [_describe(*PROMPT_TOKENS)], [_describe(*HIT_TOKENS)]
        from_host = [_describe(*HOST_HIT_TOKENS)]
        known, labels = self._labels, {}
        for instance in self._registry.instances.values():
            load = instance.load
            sent, looked_up, predicted_cached = instance.in_flight.predict_hits()
            # Not by role: after a flip the counts go on.
            key = instance.registration.model, instance.name
            labels[key] = lines = known.get(key) or _begin_lines(*key)
            prompts.append(f"{lines[0]}{float(sent)}\n{lines[1]}{float(looked_up)}\n")
            cached.append(f"{lines[2]}{float(predicted_cached)}\n")
            if load.HasField("prefix_cache_queries"):
                prompts.append(f"{lines[3]}{float(load.prefix_cache_queries)}\n")
                cached.append(f"{lines[4]}{float(count_engine_hits(load))}\n")
            if instance.host_tokens:
                loaded = instance.in_flight.predict_loaded()
                from_host.append(
                    f"{lines[5]}{float(loaded)}\n{lines[6]}{float(load.host_kv_hits)}\n"
                )
        self._labels = labels
        return "".join((*prompts, *cached, *from_host)).encode()


def _describe(name: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} counter\n"


def _begin_lines(model: str, name: str) -> tuple[str, ...]:
    labels = f'{{engine="{_format_label(name)}",model="{_format_label(model)}",source='
    return (
        f'{PROMPT_TOKENS[0]}{labels}"sent"}} ',
        f'{PROMPT_TOKENS[0]}{labels}"predicted"}} ',
        f'{HIT_TOKENS[0]}{labels}"predicted"}} ',
        f'{PROMPT_TOKENS[0]}{labels}"engine"}} ',
        f'{HIT_TOKENS[0]}{labels}"engine"}} ',
        f'{HOST_HIT_TOKENS[0]}{labels}"predicted"}} ',
        f'{HOST_HIT_TOKENS[0]}{labels}"engine"}} ',
    )


def _format_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


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
