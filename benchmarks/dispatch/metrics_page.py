"""CPU time of a gateway's metrics page by number of instances, in ms.

`python benchmarks/dispatch/metrics_page.py`, seconds: the least of 20 scrapes. With shortest wait
the page has no series of instances, by PrefixAware five of each.
"""

import sys
import time
from collections.abc import Callable

from registrations import state

from cleave.api.enums import DispatchPolicy
from cleave.gateway.metrics.families import write_page
from cleave.gateway.metrics.gateway_families import list_families
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.gateway.metrics.instance_metrics import CacheHitPage, collect_instances
from cleave.router.registry import InstanceRegistry
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import run_at_once

SCRAPES = 20


def build_registry(count: int) -> InstanceRegistry:
    """Instances that have reported hits of their caches."""
    registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
    for number in range(count):
        name = f"chat-{number}"
        event = state(name, agent_pb2.ROLE_MIXED)
        registry.on_event(name, event, 0.0)
        load = agent_pb2.LoadReport(
            boot_id=event.registration.boot_id,
            prefix_cache_queries=123_456 + number,
            prefix_cache_hits=23_456,
        )
        registry.on_event(name, agent_pb2.WatchEvent(load=load), 0.0)
    return registry


def measure_ms(render: Callable[[], object]) -> float:
    """The least CPU time of some calls."""
    times = []
    for _ in range(SCRAPES):
        start = time.process_time()
        render()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def main() -> int:
    print("instances: shortest wait, the same and hits by instance")
    for count in (8, 100, 1_000):
        instances = build_registry(count)
        hits = CacheHitPage(instances)

        def write_plain(of: InstanceRegistry = instances) -> None:
            run_at_once(write_page(list_families(GatewayMetrics())))
            run_at_once(write_page(run_at_once(collect_instances(of))))

        def write_whole(hits: CacheHitPage = hits, plain: Callable[[], None] = write_plain) -> None:
            plain()
            run_at_once(write_page(run_at_once(hits.collect())))

        plain, whole = measure_ms(write_plain), measure_ms(write_whole)
        print(f"{count:9,}: {plain:6.2f} {whole:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
