"""Prometheus metrics of the instances that the gateway watches, beside its own.

Every gateway exports all instances, so queries take the maximum over gateways, never the sum, but
for what a gateway has sent itself. The ports of engines are not fixed, so their load is scraped
from the gateway instead.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from cleave.gateway.metrics.families import Family, build_gauge, format_labels
from cleave.gateway.metrics.pair_summary import find_partners, summarize_pairs
from cleave.router.instance import Connectivity, RoutedInstance, count_engine_hits
from cleave.router.registry import InstanceRegistry
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import Steps

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


def collect_instances(registry: InstanceRegistry) -> Steps[list[Family]]:
    """The families of the instances and their pairs, by model and role."""
    states: Counter[tuple[str, ...]] = Counter()
    requests: Counter[tuple[str, ...]] = Counter()
    fullest: dict[tuple[str, ...], float] = {}
    youngest_s: dict[tuple[str, ...], float] = {}
    for instance in list(registry.instances.values()):
        yield
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
    text = "Instances that this gateway knows"
    families = [_build_gauge("instances", text, states, "state")]
    text = "Requests at engines, as they report"
    families.append(_build_gauge("engine_requests", text, requests, "state"))
    text = "KV memory in use at the fullest instance, 0 to 1"
    families.append(_build_gauge("engine_kv_usage_max", text, fullest))
    text = (
        "Least age of an instance's least recently used KV block, of those that report it: what"
        " was used since is cached"
    )
    families.append(_build_gauge("engine_kv_age_seconds_min", text, youngest_s))
    return families + (yield from _collect_pairs(registry))


def _collect_pairs(registry: InstanceRegistry) -> Steps[list[Family]]:
    """What canary handoffs have shown, by model."""
    states: Counter[tuple[str, ...]] = Counter()
    oldest_s: dict[str, float] = {}
    slowest: dict[str, float] = {}
    for table in registry.list_tables():
        model, now = table.instances[0].registration.model, registry.latest_s
        prefills, decodes = yield from find_partners(table)
        for decode in decodes:
            yield
            summary = summarize_pairs(prefills, decode)
            proven, closed = len(summary.proven), len(summary.closed)
            states[model, "proven"] += proven
            states[model, "closed"] += closed
            states[model, "unproven"] += summary.total - proven - closed
            oldest_s[model] = max(oldest_s.get(model, 0.0), summary.get_oldest_age_s(now))
            if (path := summary.find_slowest()) is not None:
                slowest[model] = min(slowest.get(model, path.bytes_per_s), path.bytes_per_s)
    pairs, age = "cleave_gateway_kv_pairs", "cleave_gateway_kv_proof_age_seconds_max"
    rate = "cleave_gateway_kv_pair_bytes_per_second_min"
    text = "Pairs of a prefill and a decode instance, by what canary handoffs have shown"
    return [
        build_gauge(pairs, text, states.items(), "model", "state"),
        build_gauge(age, "Age of the oldest proof of a pair", oldest_s.items(), "model"),
        build_gauge(rate, "KV transfer rate of the slowest proven pair", slowest.items(), "model"),
    ]


class CacheHitPage:
    """What engines were expected to have cached of prompts, and what they had, by instance.

    There are five lines for each instance, seven if it has host memory for KV, so labels are
    formatted once per instance, not at each scrape.
    """

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry
        self._labels: dict[tuple[str, str], tuple[str, ...]] = {}
        """Beginnings of the lines by model and name, of the instances of the last scrape."""

    def collect(self) -> Steps[list[Family]]:
        """Called at each scrape."""
        prompts: list[str] = []
        cached: list[str] = []
        from_host: list[str] = []
        known, labels = self._labels, {}
        for instance in list(self._registry.instances.values()):
            yield
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
        return build_hit_families(prompts, cached, from_host)


def build_hit_families(*lines: Iterable[str]) -> list[Family]:
    """The families of `CacheHitPage`; `lines`: of each."""
    described = zip((PROMPT_TOKENS, HIT_TOKENS, HOST_HIT_TOKENS), lines, strict=True)
    return [Family(*name, "counter", HIT_LABELS, each) for name, each in described]


def _begin_lines(model: str, name: str) -> tuple[str, ...]:
    sent, predicted, engine = (
        format_labels(HIT_LABELS, (model, name, source))
        for source in ("sent", "predicted", "engine")
    )
    return (
        f"{PROMPT_TOKENS[0]}{sent} ",
        f"{PROMPT_TOKENS[0]}{predicted} ",
        f"{HIT_TOKENS[0]}{predicted} ",
        f"{PROMPT_TOKENS[0]}{engine} ",
        f"{HIT_TOKENS[0]}{engine} ",
        f"{HOST_HIT_TOKENS[0]}{predicted} ",
        f"{HOST_HIT_TOKENS[0]}{engine} ",
    )


def _build_gauge(
    name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    return build_gauge(f"cleave_gateway_{name}", text, values.items(), "model", "role", *labels)


def _get_state_label(instance: RoutedInstance) -> str:
    if instance.connectivity in (Connectivity.FRESH, Connectivity.STALE):
        return get_enum_name(agent_pb2.State, instance.registration.state)
    return "unreachable"
