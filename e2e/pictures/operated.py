"""The cluster behind the picture of *Control plane*: operators, a planned deployment, a Prometheus.

Used by `run.py` inside `scripts/isolated`. The deployment is planned for its traffic, and in the
middle of the time its engines become slower than their latency profile says: the operator corrects
the profile, then plans again, so that every panel about plans has something to show.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from e2e.cluster.cluster import opened, wait_until
from e2e.cluster.open_loop_load import Kind, Stream
from e2e.support.prometheus import Prometheus, pod_jobs, running
from e2e.test_cluster_operator import Chat, installation
from e2e.test_cluster_replan import manifest, slow_down, started

TRAFFIC = Kind(rate=8, prompt_tokens=500, output_tokens=16)
_WATCHFUL = ("--set", "operator.args={--watch-interval=1}")
_TARGETS_MS = {"ttftMs": 750, "tpotMs": 100}
_SLOWNESS = 2.0
_SLOW_FROM = 0.3
"""Share of the time after which engines are slow."""
_LOOK_S = 3.0
_PAGES = 6
"""Two operators, two gateways and two engines."""
_PAGES_S = 60


@dataclass(frozen=True)
class Operated:
    """A deployment of a cluster, and the Prometheus that scrapes its pods and the operators."""

    chat: Chat
    prometheus: Prometheus
    stream: Stream

    def pass_time(self, duration_s: float) -> None:
        """Wait for so long; engines are slow from _SLOW_FROM of it on, also those that start."""
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < duration_s:
            if passed_s > _SLOW_FROM * duration_s:
                # Of an instance that starts or ends the engine is not there.
                with suppress(httpx.HTTPError, LookupError, KeyError):
                    slow_down(self.chat, _SLOWNESS)
            time.sleep(_LOOK_S)

    def is_scraped(self) -> bool:
        """Whether all pages of the first instances are read."""
        up = [target for target in self.prometheus.targets() if target["health"] == "up"]
        return len(up) >= _PAGES


@contextmanager
def operated(programs: Path, folder: Path, scrape_s: int) -> Iterator[Operated]:
    """Start all of it; `programs`: where Prometheus is. Yields once it serves and is scraped."""
    text = manifest(TRAFFIC, {"args": ["--fault-injection"]}, _TARGETS_MS, {"flipping": "Off"})
    with (
        opened(folder / "cluster") as cluster,
        installation(cluster, *_WATCHFUL),
        started(cluster, text, "team-a") as chat,
        running(
            programs,
            folder / "prometheus",
            pod_jobs(cluster.kubeconfig),
            interval=f"{scrape_s}s",
        ) as prometheus,
        Stream(chat.address, "chat", TRAFFIC) as stream,
    ):
        found = Operated(chat, prometheus, stream)
        wait_until(found.is_scraped, _PAGES_S, "operators, gateways and engines are scraped")
        yield found
