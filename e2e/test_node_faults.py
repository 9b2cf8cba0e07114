"""Faults that only real nodes have, under a steady load of chats through the gateway's Service.

`make e2e-node NODE_TESTS=e2e/test_node_faults.py ARGS=-s`. Each test prints what clients saw, how
long it took until everything was as before, and what was left; build/test_node_faults.md keeps it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import yaml

from e2e.cluster import tools
from e2e.cluster.cluster import Cluster, wait_until
from e2e.real_nodes.fault_report import FaultReport, is_whole
from e2e.real_nodes.processes import PodProcess, exhaust_memory, find_process
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.test_cluster_operator import (
    CHAT,
    SYSTEM,
    Chat,
    holder,
    installed,
    placement,
)

__all__ = ["installed"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node`"),
]

AGENT, ENGINE = "cleave_worker.agent.main", "cleave_worker.emulator.main"
GATEWAY, OPERATOR = "cleave.gateway.main", "cleave.controller.main"
STREAMS = 4
"""Chats of the load at a time: what one process can take along when it dies."""
REFUSED = 16
"""New connections that a Service may send to a gateway that died, until its node says so."""
SEEN_S = 60
"""Longest time until a fault shows."""


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> FaultReport:
    return FaultReport(tools.REPOSITORY / "build" / f"{request.path.stem}.md")


@pytest.fixture(scope="module")
def deployed(installed: Cluster) -> Iterator[Chat]:
    """Two prefill and two decode instances, which all tests use one after the other."""
    installed.kubectl("create", "namespace", "faults")
    chat = Chat(installed, "faults")
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["placement"]["manual"] = placement(prefill=2, decode=2)
    manifest["spec"]["template"] = {"resources": {"limits": {"ephemeral-storage": "200Mi"}}}
    installed.apply(manifest, namespace=chat.namespace)
    try:
        chat.until_ready()
        yield chat
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", chat.namespace, timeout_s=180)
        # The next module makes one of the same name.
        installed.kubectl("delete", "namespace", chat.namespace, timeout_s=180)


@pytest.fixture
def chat(deployed: Chat) -> Chat:
    wait_until(lambda: is_whole(deployed), 120, "the last fault is over")
    return deployed


@dataclass(frozen=True)
class Component:
    """Pods that a fault may hit."""

    name: str
    selector: str
    namespace: str
    program: str
    """Part of the command line of the container's main process."""

    def list_pods(self, chat: Chat) -> list[dict]:
        return chat.cluster.list("pods", self.namespace, self.selector)

    def find_main(self, pod: dict) -> PodProcess | None:
        return find_process(pod["metadata"]["uid"], self.program)


WORKER = Component(
    "decode worker", "cleave.dev/component=worker,cleave.dev/role=decode", "faults", AGENT
)
PREFILL = Component(
    "prefill worker", "cleave.dev/component=worker,cleave.dev/role=prefill", "faults", AGENT
)
FRONT = Component("gateway", "cleave.dev/component=gateway", "faults", GATEWAY)
CONTROL = Component("operator", "app.kubernetes.io/name=cleave", SYSTEM, OPERATOR)


def pick_serving(component: Component, chat: Chat) -> dict:
    """A pod that works: of the operator, the one that leads."""
    # The kubelet waits longer with each start of the same container.
    pods = sorted(component.list_pods(chat), key=lambda pod: count_restarts(pod, chat))
    if component is CONTROL:
        leader = holder(chat.cluster).partition("_")[0]
        return next(pod for pod in pods if pod["metadata"]["name"] == leader)
    return pods[0]


def count_restarts(pod: dict, chat: Chat) -> int:
    meta = pod["metadata"]
    found = chat.cluster.get("pods", meta["name"], meta["namespace"])
    return sum(each["restartCount"] for each in (found or pod)["status"]["containerStatuses"])


def has_ended(pod: dict, chat: Chat) -> bool:
    """Whether a pod is gone or its container was started again."""
    meta = pod["metadata"]
    found = chat.cluster.get("pods", meta["name"], meta["namespace"])
    if found is None or found["metadata"]["uid"] != meta["uid"]:
        return True
    before = {each.get("containerID") for each in pod["status"].get("containerStatuses", [])}
    now = {each.get("containerID") for each in found["status"].get("containerStatuses", [])}
    return before != now or any(
        "terminated" in each["state"] for each in found["status"].get("containerStatuses", [])
    )


def delete(pod: dict, chat: Chat) -> None:
    meta = pod["metadata"]
    chat.cluster.kubectl("delete", "pod", meta["name"], "-n", meta["namespace"], "--wait=false")


def signal_while_it_serves(component: Component, chat: Chat, number: signal.Signals) -> None:
    pod = pick_serving(component, chat)
    main = component.find_main(pod)
    assert main is not None
    main.signal(number)
    wait_until(lambda: has_ended(pod, chat), SEEN_S, "its container has ended")


def signal_while_it_starts(component: Component, chat: Chat, number: signal.Signals) -> None:
    """A new pod's process gets the signal as soon as there is one."""
    before = {pod["metadata"]["uid"] for pod in component.list_pods(chat)}
    delete(pick_serving(component, chat), chat)

    def find_started() -> tuple[dict, PodProcess] | None:
        for pod in component.list_pods(chat):
            if pod["metadata"]["uid"] not in before and (main := component.find_main(pod)):
                return pod, main
        return None

    pod, main = wait_until(find_started, SEEN_S, "another one starts")
    main.signal(number)
    wait_until(lambda: not main.is_running, SEEN_S, "its process has ended")
    wait_until(lambda: count_restarts(pod, chat) > 0, SEEN_S, "it is started again")


def signal_while_it_drains(component: Component, chat: Chat, number: signal.Signals) -> None:
    pod = pick_serving(component, chat)
    main = component.find_main(pod)
    assert main is not None
    delete(pod, chat)
    wait_until(lambda: is_leaving(pod, chat), SEEN_S, "it leaves")
    main.signal(number)
    wait_until(lambda: has_ended(pod, chat), SEEN_S, "it is gone")


def is_leaving(pod: dict, chat: Chat) -> bool:
    meta = pod["metadata"]
    found = chat.cluster.get("pods", meta["name"], meta["namespace"])
    return found is None or "deletionTimestamp" in found["metadata"]


MOMENTS: dict[str, Callable[[Component, Chat, signal.Signals], None]] = {
    "starts": signal_while_it_starts,
    "serves": signal_while_it_serves,
    "drains": signal_while_it_drains,
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("component", [WORKER, FRONT, CONTROL], ids=lambda each: each.name)
def test_a_signal(
    chat: Chat, report: FaultReport, component: Component, moment: str, number: signal.Signals
) -> None:
    with report.observe(chat, f"{number.name}: {component.name} that {moment}") as seen:
        MOMENTS[moment](component, chat, number)
    # Only a killed process takes its streams along, and a worker's streams go on elsewhere.
    may_fail = number is signal.SIGKILL and component is FRONT and moment != "starts"
    assert len(seen.failures) <= (STREAMS + REFUSED if may_fail else 0), seen.failures


@dataclass(frozen=True)
class Victim:
    """The largest process of a container, which its memory limit ends."""

    component: Component
    program: str
    may_fail: int = 0


@pytest.mark.parametrize(
    "victim",
    [
        Victim(WORKER, ENGINE),
        Victim(FRONT, GATEWAY, may_fail=STREAMS + REFUSED),
        Victim(CONTROL, OPERATOR),
    ],
    ids=lambda each: each.component.name,
)
def test_a_process_beyond_its_memory(chat: Chat, report: FaultReport, victim: Victim) -> None:
    pod = pick_serving(victim.component, chat)
    process = find_process(pod["metadata"]["uid"], victim.program)
    assert process is not None
    with report.observe(chat, f"out of memory: {victim.component.name}") as seen:
        exhaust_memory(process)
        wait_until(lambda: not process.is_running, SEEN_S, "the kernel has killed it")
        if victim.program != ENGINE:
            wait_until(lambda: has_ended(pod, chat), SEEN_S, "its container has ended")
        else:
            again = lambda: find_process(pod["metadata"]["uid"], ENGINE)  # noqa: E731
            wait_until(again, SEEN_S, "its agent starts another")
    assert len(seen.failures) <= victim.may_fail, seen.failures


def test_a_full_disk_of_a_worker(chat: Chat, report: FaultReport) -> None:
    """Above the limit of its scratch space the kubelet evicts the pod; another takes its place."""
    pod = pick_serving(WORKER, chat)
    meta = pod["metadata"]
    with report.observe(chat, "a worker writes beyond its ephemeral storage") as seen:
        write = "import pathlib; pathlib.Path('/tmp/full').write_bytes(b'0' * (300 << 20))"
        chat.cluster.kubectl("exec", meta["name"], "-n", "faults", "--", "python", "-c", write)
        wait_until(lambda: has_ended(pod, chat) or is_leaving(pod, chat), 120, "it is evicted")
    assert seen.failures == []


def test_an_image_that_cannot_be_pulled(chat: Chat, report: FaultReport) -> None:
    with report.observe(chat, "a rollout to an image that cannot be pulled, set back") as seen:
        chat.edit({"engine": {"image": "127.0.0.1:1/ai/none:1"}})
        wait_until(lambda: "none:1" in degraded(chat), SEEN_S, "the condition names the image")
        print(f"  Degraded: {degraded(chat)}")
        print(f"  Ready: {condition_text(chat, 'Ready')}")
        chat.edit({"engine": {"image": None}})
    assert seen.failures == []


def degraded(chat: Chat) -> str:
    return condition_text(chat, "Degraded")


def condition_text(chat: Chat, kind: str) -> str:
    conditions = chat.deployment["status"]["conditions"]
    found = next((each for each in conditions if each["type"] == kind), {})
    return f"{found.get('status')} {found.get('reason')}: {found.get('message')}"
