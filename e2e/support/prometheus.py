"""A real Prometheus (`scripts/prometheus` builds it) for tests and benchmarks, on a free port."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.control_plane import TIED
from tests.support.ports import find_free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60
_BUILD_TIMEOUT_S = 1800

Sample = dict[str, Any]


class QueryError(ValueError):
    """Prometheus does not take the query."""


@dataclass(frozen=True)
class Prometheus:
    """One that is ready."""

    url: str

    def ask(self, query: str) -> list[Sample]:
        """What the query gives now. Raises QueryError."""
        return list(self._get("query", query=query)["result"])

    def look_back(self, query: str, since_s: float, until_s: float, step_s: float) -> list[Sample]:
        """The same from `since_s` to `until_s`, in Unix time. Raises QueryError."""
        response = self._get("query_range", query=query, start=since_s, end=until_s, step=step_s)
        return list(response["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Every record and alert, with its health and state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, and whether that works."""
        return list(self._get("targets")["activeTargets"])

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **fields: str | float) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(error.read().decode(errors="replace")) from error


def find_programs(*, build: bool) -> Path | None:
    """The folder of prometheus and promtool; None: they are not built, and were not to be."""
    line = [str(ROOT / "scripts" / "prometheus"), *(() if build else ("--built",))]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, timeout=_BUILD_TIMEOUT_S, check=False
    )
    if done.returncode and build:
        raise RuntimeError("scripts/prometheus failed; it says above why")
    return None if done.returncode else Path(done.stdout.strip())


def pod_jobs(kubeconfig: Path) -> list[dict[str, object]]:
    """Scrapes of what the chart's PodMonitors find in a cluster: operators, gateways, engines."""

    def keep(value: str, label: str) -> dict[str, object]:
        return {"source_labels": [f"__meta_kubernetes_{label}"], "regex": value, "action": "keep"}

    def copy(label: str, to: str) -> dict[str, object]:
        return {"source_labels": [f"__meta_kubernetes_{label}"], "target_label": to}

    which = {
        "operator": (
            keep("operator", "pod_label_app_kubernetes_io_component"),
            keep("http", "pod_container_port_name"),
        ),
        "gateways": (
            keep("gateway", "pod_label_cleave_dev_component"),
            keep("internal", "pod_container_port_name"),
        ),
        "engines": (
            keep("worker", "pod_label_cleave_dev_component"),
            keep("engine", "pod_container_port_name"),
        ),
    }
    found = [{"role": "pod", "kubeconfig_file": str(kubeconfig)}]
    names = [copy("namespace", "namespace"), copy("pod_name", "pod")]
    return [
        {
            "job_name": name,
            "kubernetes_sd_configs": found,
            "relabel_configs": [*labels_kept, *names],
        }
        for name, labels_kept in which.items()
    ]


@contextmanager
def running(
    programs: Path,
    folder: Path,
    jobs: Sequence[Mapping[str, object]],
    rules: Mapping[str, object] | None = None,
    interval: str = "1s",
    port: int = 0,
) -> Iterator[Prometheus]:
    """One with `jobs` (scrape_configs) and `rules` (a file's content), its data in `folder`.
    `port`: 0: any free one."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "scrape_configs": list(jobs),
    }
    if rules is not None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        config["rule_files"] = ["rules.yaml"]
    with configured(programs, folder, config, port) as found:
        yield found


@contextmanager
def configured(
    programs: Path, folder: Path, config: Mapping[str, object], port: int = 0
) -> Iterator[Prometheus]:
    """One with a whole configuration; paths of rules are relative to `folder`."""
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{port or find_free_port()}"
    line = [
        *(sys.executable, "-I", "-S", "-c", TIED, str(os.getpid())),
        str(programs / "prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        found = Prometheus(f"http://{address}")
        end = time.monotonic() + START_TIMEOUT_S
        while not found.is_ready():
            if process.poll() is not None or time.monotonic() > end:
                tail = (folder / "prometheus.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Prometheus does not start:\n{tail}")
            time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait()
