"""What an API server has done: requests by verb and by client, and its own limits.

Clients are distinguished by the flow schema that API Priority and Fairness (APF) puts their
requests into: `service-accounts` is the operator, as the benchmark has no other account; `exempt`
are the controllers and the benchmark, members of system:masters; `system-nodes` and
`system-node-high` are hollow nodes.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

OPERATOR = "service-accounts"
_SAMPLE = re.compile(r"^(apiserver_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ApiServerReading:
    """Totals since the API server's start."""

    at_s: float
    verbs: dict[str, int]
    """Requests by verb, watches left out: those last."""
    clients: dict[str, int]
    """Requests that APF has dispatched, by flow schema."""
    operator_seat_s: float
    """Time for which the operator's requests held seats."""
    operator_wait_s: float
    """Time for which they waited for seats."""
    rejected: int
    """Of all requests, 429."""
    operator_seats: int
    """Nominal seats of the priority level that the operator shares."""

    def __sub__(self, before: "ApiServerReading") -> "ApiServerReading":
        return ApiServerReading(
            at_s=self.at_s - before.at_s,
            verbs=_subtract(self.verbs, before.verbs),
            clients=_subtract(self.clients, before.clients),
            operator_seat_s=self.operator_seat_s - before.operator_seat_s,
            operator_wait_s=self.operator_wait_s - before.operator_wait_s,
            rejected=self.rejected - before.rejected,
            operator_seats=self.operator_seats,
        )


def parse(metrics: str, at_s: float) -> ApiServerReading:
    """A reading of the text of the API server's /metrics."""
    verbs: Counter[str] = Counter()
    clients: Counter[str] = Counter()
    sums: dict[str, float] = defaultdict(float)
    level, seats = "", dict[str, int]()
    for name, text, number in _SAMPLE.findall(metrics):
        labels, value = dict(_LABEL.findall(text)), float(number)
        match name.removeprefix("apiserver_"):
            case "request_total" if labels["verb"] not in ("WATCH", "CONNECT"):
                verbs[labels["verb"]] += int(value)
            case "flowcontrol_dispatched_requests_total":
                clients[labels["flow_schema"]] += int(value)
                if labels["flow_schema"] == OPERATOR:
                    level = labels["priority_level"]
            case "flowcontrol_nominal_limit_seats":
                seats[labels["priority_level"]] = int(value)
            case "flowcontrol_rejected_requests_total":
                sums["rejected"] += value
            case "flowcontrol_request_execution_seconds_sum" if labels["flow_schema"] == OPERATOR:
                sums["seat_s"] += value
            case "flowcontrol_request_wait_duration_seconds_sum" if (
                labels["flow_schema"] == OPERATOR
            ):
                sums["wait_s"] += value
    return ApiServerReading(
        at_s=at_s,
        verbs=dict(verbs),
        clients=dict(clients),
        operator_seat_s=sums["seat_s"],
        operator_wait_s=sums["wait_s"],
        rejected=int(sums["rejected"]),
        operator_seats=seats.get(level, 0),
    )


def _subtract(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}
