"""What clients see of a fault on real nodes, as a row of a table that tests print and keep.

`FaultReport.observe` puts chats through the gateway's Service while a test does harm, and measures
until everything is as before. Used by e2e/test_node_faults.py.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import CommandError, wait_until
from e2e.test_cluster_operator import SYSTEM, Chat, condition, read_log

SLOW_S = 1.0
"""A chat of the load takes a quarter of a second; one that takes longer than this is slow."""
WHOLE_S = 150
"""Longest time from the fault until everything is as before."""
_ANSWERS = 20
_HEADER = ("fault", "answered", "failed", "repeated", "slow", "slowest s", "whole after s", "left")
_READ_METRICS = (
    "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8081/metrics').read().decode())"
)
_RETRIES = re.compile(r"^cleave_gateway_retries_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A fault, and what clients saw of it."""

    fault: str
    answered: int
    failed: int
    repeated: str
    """Attempts that gateways repeated; with `+`: that, and those of a gateway that ended."""
    slow: int
    slowest_s: str
    whole_after_s: str
    left: str
    """What was not there before."""


@dataclass
class Observation:
    """A fault while clients are served; complete when its block has been left."""

    load: Load
    row: Row | None = None

    @property
    def failures(self) -> list[str]:
        """What clients did not get."""
        return self.load.failures


@dataclass
class FaultReport:
    """The table; `file` is written after each row."""

    file: Path
    rows: list[Row] = field(default_factory=list)

    @contextmanager
    def observe(self, chat: Chat, fault: str, whole_s: float = WHOLE_S) -> Iterator[Observation]:
        """Load while the block lasts and until everything is as before; adds a row.

        The block does harm and waits until the harm shows.
        """
        before, retries = _list_remains(chat), _count_retries(chat)
        with Load(chat.address, "chat") as load:
            wait_until(lambda: load.answered > _ANSWERS, 60, "the load is on")
            begun, harmed = time.monotonic(), time.time()
            observation = Observation(load)
            yield observation
            _wait_until_whole(chat, begun + whole_s - time.monotonic(), fault)
            whole_after_s = time.monotonic() - begun
            after = load.answered
            wait_until(lambda: load.answered > after + _ANSWERS, 60, "everything answers")
        repeated = _count_retries(chat)
        left = _list_remains(chat) - before
        observation.row = Row(
            fault=fault,
            answered=load.answered,
            failed=len(load.failures),
            repeated=_subtract(repeated, retries),
            slow=sum(took_s > SLOW_S for took_s, _ in load.durations_s),
            slowest_s=f"{max(load.durations_s)[0]:.1f}",
            whole_after_s=f"{whole_after_s:.0f}",
            left=", ".join(f"{count} {what}" for what, count in sorted(left.items())) or "nothing",
        )
        self.add(observation.row)
        # Waits of seconds without a cause here are those of a machine that does other work.
        print(f"  load average of the machine: {os.getloadavg()[0]:.0f}")
        for took_s, began in sorted(load.durations_s, reverse=True)[:3]:
            print(f"  {took_s:.1f} s for a question of {began - harmed:+.1f} s")
        for failure in load.failures[:5]:
            print(f"  {failure}")

    def add(self, row: Row) -> None:
        """Print a row and keep it."""
        self.rows.append(row)
        print(f"\n{_format(_HEADER)}\n{_format(astuple(row))}")
        lines = [_format(_HEADER), _format(["---"] * len(_HEADER))]
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text("\n".join([*lines, *(_format(astuple(each)) for each in self.rows)]))


def is_whole(chat: Chat) -> bool:
    """Whether the deployment is ready and settled, and all pods of it and of the operator are."""
    found = chat.deployment
    pods = [*_list_pods(chat, chat.namespace), *_list_pods(chat, SYSTEM)]
    running = [pod for pod in pods if pod["status"].get("phase") not in ("Failed", "Succeeded")]
    operators = chat.cluster.get("deployment", "cleave-operator", SYSTEM) or {"status": {}}
    num_pods = sum(each["replicas"] for each in found["status"]["roles"]) + 2
    return (
        chat.is_ready()
        and condition(found, "Degraded") == "False"
        and all(condition(pod, "Ready") == "True" for pod in running)
        and not any("deletionTimestamp" in pod["metadata"] for pod in pods)
        and len(_list_pods(chat, chat.namespace)) >= num_pods
        and operators["status"].get("readyReplicas") == 2
    )


def _wait_until_whole(chat: Chat, timeout_s: float, fault: str) -> None:
    try:
        wait_until(lambda: is_whole(chat), timeout_s, f"{fault}: all is as before")
    except AssertionError as error:
        text = f"{error}\n{read_log(chat.cluster, chat.namespace)}\n{read_log(chat.cluster)}"
        raise AssertionError(text) from error


def _list_pods(chat: Chat, namespace: str) -> list[dict]:
    return chat.cluster.list("pods", namespace)


def _list_remains(chat: Chat) -> Counter[str]:
    """What faults leave: restarts of containers, and pods that have ended."""
    remains: Counter[str] = Counter()
    for pod in [*_list_pods(chat, chat.namespace), *_list_pods(chat, SYSTEM)]:
        component = pod["metadata"]["labels"].get("cleave.dev/component", "operator")
        status = pod["status"]
        if status.get("phase") in ("Failed", "Succeeded"):
            remains[f"{component} pod {status.get('reason', status['phase'])}"] += 1
        for each in status.get("containerStatuses", []):
            if each["restartCount"]:
                remains[f"{component} restarts"] += each["restartCount"]
    return remains


def _count_retries(chat: Chat) -> dict[str, float]:
    """Repeated attempts of each gateway that answers, by its container's id."""
    counts: dict[str, float] = {}
    for pod in chat.cluster.list("pods", chat.namespace, "cleave.dev/component=gateway"):
        if condition(pod, "Ready") != "True" or "deletionTimestamp" in pod["metadata"]:
            continue
        (container,) = pod["status"]["containerStatuses"]
        inside = ("exec", pod["metadata"]["name"], "-n", chat.namespace, "--", "python", "-c")
        with suppress(CommandError):
            text = chat.cluster.kubectl(*inside, _READ_METRICS)
            counts[container["containerID"]] = sum(map(float, _RETRIES.findall(text)))
    return counts


def _subtract(after: dict[str, float], before: dict[str, float]) -> str:
    count = int(sum(number - before.get(name, 0.0) for name, number in after.items()))
    return f"{count}+" if before.keys() - after.keys() else str(count)


def _format(cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"  # type: ignore[call-overload]
