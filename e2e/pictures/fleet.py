"""The fleet behind the pictures: emulated instances of `cleave up`, scraped by a Prometheus."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from cleave.local.state import StateFolder
from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed
from e2e.support.engine_keys import headers_for
from e2e.support.prometheus import Prometheus, running

MODEL = "chat"
SCRAPE_S = 5
_START_S = 120
_TARGETS = "targets.json"
MANIFEST: dict[str, object] = {
    "apiVersion": "cleave.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"source": "facebook/opt-13b", "servedName": MODEL, "maxModelLen": 8192},
        "slo": {"ttftMs": 1000, "tpotMs": 60},
        "engine": {"type": "Emulated", "args": ["--fault-injection"]},
        "routing": {"late": "Refuse"},
        "placement": {
            "manual": [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 3}]
        },
    },
}


class Fleet:
    """A deployment that serves, and the Prometheus that scrapes its gateway and engines."""

    def __init__(self, deployment: Deployment, prometheus: Prometheus, folder: Path) -> None:
        self.deployment, self.prometheus = deployment, prometheus
        self._targets = folder / _TARGETS

    def find_engines(self) -> None:
        """Let Prometheus scrape the engines that there are now: a new one has a new port."""
        snapshot = StateFolder(self.deployment.state_dir / self.deployment.name).read()
        assert snapshot is not None
        found = [_describe_target(urlsplit(snapshot.internal_url).netloc, "chat-gateway")]
        for health in self.deployment.healths():
            registration = health.registration
            if registration.engine_url:
                address = urlsplit(registration.engine_url).netloc
                found.append(_describe_target(address, registration.instance))
        self._targets.write_text(json.dumps(found))

    def injure(self, role: "agent_pb2.Role", **faults: object) -> None:
        """Inject faults into the first engine of a role, if there is one at the moment."""
        for health in self.deployment.healths():
            registration = health.registration
            if registration.role == role and registration.engine_url:
                # An engine that dies of it does not answer.
                with suppress(httpx.TransportError):
                    httpx.post(
                        f"{registration.engine_url}/emulator/faults",
                        json=faults,
                        headers=headers_for(registration.engine_url),
                    ).raise_for_status()
                return


@contextmanager
def started(programs: Path, folder: Path) -> Iterator[Fleet]:
    """Start both; `programs`: where Prometheus is. The folder keeps their files."""
    jobs = [{"job_name": "cleave", "file_sd_configs": [{"files": [str(folder / _TARGETS)]}]}]
    with (
        deployed(MANIFEST, folder, _START_S) as deployment,
        running(programs, folder / "prometheus", jobs, interval=f"{SCRAPE_S}s") as prometheus,
    ):
        fleet = Fleet(deployment, prometheus, folder)
        fleet.find_engines()
        yield fleet


def _describe_target(address: str, pod: str) -> dict[str, object]:
    """As file-based discovery reads it, with the labels that a PodMonitor adds."""
    return {"targets": [address], "labels": {"pod": pod, "namespace": "default"}}
