from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from cleave.api.deployment import LLMDeployment

PHASE_MS = 60_000.0


@pytest.fixture
def lengths(module, tmp_path: Path):
    traffic = module("traffic")
    rows = {
        "code": "2023-11-16 18:00:0{}.0,{}000,1",
        "conversation": "2023-11-16 18:00:0{}.0,{}00,200",
    }
    for service, name in traffic.FILES.items():
        lines = [rows[service].format(second, second + 1) for second in range(10)]
        (tmp_path / name).write_text(
            "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n"
        )
    return traffic.read_lengths(tmp_path, 8192)


@pytest.fixture
def day(module, lengths):
    traffic = module("traffic")
    return traffic.draw_day(traffic.PHASES, lengths, PHASE_MS, seed=1)


def test_a_seed_gives_the_same_day_again(module, lengths, day) -> None:
    traffic = module("traffic")
    again, other = (traffic.draw_day(traffic.PHASES, lengths, PHASE_MS, seed=s) for s in (1, 2))
    assert np.array_equal(again.trace.arrival_ms, day.trace.arrival_ms)
    assert not np.array_equal(other.trace.arrival_ms, day.trace.arrival_ms)


def test_each_phase_has_its_rate_its_lengths_and_its_time(day) -> None:
    assert np.all(np.diff(day.trace.arrival_ms) >= 0)
    for index, phase in enumerate(day.phases):
        mine = day.cut(index)
        assert len(mine) == phase.rate * PHASE_MS / 1e3
        assert 0 <= mine.arrival_ms[0] <= mine.arrival_ms[-1] < PHASE_MS
    # A request of a single token has no time per output token, so code answers have two.
    assert set(day.cut(0).output_tokens) == {2}
    assert set(day.cut(1).output_tokens) == {200}


def test_requests_that_do_not_fit_the_model_are_left_out(lengths) -> None:
    assert max(lengths["code"].prompt_tokens) == 8000


def test_bursts_come_with_wider_gaps(day) -> None:
    def spread(index: int) -> float:
        gaps = np.diff(day.cut(index).arrival_ms)
        return float(gaps.std() / gaps.mean())

    names = [phase.name for phase in day.phases]
    assert spread(names.index("bursts")) > 1.5 > spread(names.index("doubled"))


def test_what_failed_or_was_never_answered_is_not_attained(module, day) -> None:
    scoring = module("scoring")
    count = len(day.trace)
    first, end = np.full(count, 100.0), np.full(count, 100.0 + 10.0)
    first[0] = end[0] = np.nan
    first[1] = end[1] = np.inf
    first[2] = end[2] = 1e6
    seen = scoring.Seen(first, end, np.zeros(count), ("request 0: lost",), 0.5)
    counts = scoring.ReportedCounts(flips=3, replans=2, instance_s=3_600.0)
    result = scoring.score("both", day, seen, 0.5, counts)
    assert (result.failed, result.unanswered, result.attained) == (1, 1, count - 3)
    assert result.instance_hours == 2.0, "of the trace's clock, which is twice as fast"
    assert [phase.attainment for phase in result.phases[1:]] == [1.0] * 4
    assert result.phases[0].attained == result.phases[0].requests - 3


def test_results_are_read_as_they_were_written(module, day, tmp_path: Path) -> None:
    scoring, environment = module("scoring"), module("environment")
    seen = scoring.Seen(*(np.ones(len(day.trace)) for _ in range(3)), ("fault",), 0.5)
    scoring.write_seen(tmp_path / "seen.npz", seen)
    again = scoring.read_seen(tmp_path / "seen.npz")
    assert again.faults == seen.faults
    assert np.array_equal(again.end_ms, seen.end_ms)
    result = scoring.score("both", day, seen, 0.5, scoring.ReportedCounts(0, 0, 0.0))
    environment.write_json(tmp_path / "both.json", asdict(result))
    assert scoring.read_result(tmp_path / "both.json") == result


def test_every_mode_is_a_deployment_that_the_api_takes(module, day, lengths) -> None:
    deployment = module("deployment")
    workload = deployment.make_workload(day.phases[0], lengths, 0.5)
    assert workload["rate"] == 2 * day.phases[0].rate, "on the wall's clock"
    pools = [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 1}]
    for manifest in (
        deployment.placed(pools, 0.5, flips=False),
        deployment.planned(workload, 0.5, 10, flips=True),
    ):
        assert LLMDeployment.model_validate(manifest).spec.slo.ttft_ms == 1000.0
    assert deployment.say(pools) == "2P 1D"


def test_the_chart_shows_shares_of_arrived_requests(module, day, tmp_path: Path) -> None:
    scoring, chart = module("scoring"), module("chart")
    ones = np.ones(len(day.trace))
    late = np.where(day.phase_of == 0, 1.0, 1e6)
    seen = scoring.Seen(late, late + 1.0, ones, (), 0.5)
    at_s, share = chart.find_shares(day, seen)
    assert {at < PHASE_MS / 1e3 for at, part in zip(at_s, share, strict=True) if part == 1.0} == {
        True
    }
    assert set(share) == {0.0, 1.0}
    chart.draw(tmp_path / "day.html", day, {"both": seen})
    assert "requests within both targets" in (tmp_path / "day.html").read_text()


class Cluster:
    """Answers as kubectl does."""

    def __init__(self, nodes: list[str]) -> None:
        self.pods = [{"spec": {"nodeName": node}} for node in nodes]
        self.said: list[str] = []

    def list(self, *_: str) -> list[dict]:
        return self.pods

    def kubectl(self, *words: str, timeout_s: float) -> None:
        self.said.append(words[0])

    def apply(self, manifest: dict) -> None:
        self.said.append("apply")


class Nodes:
    """Notes what becomes of nodes, in the cluster's list."""

    def __init__(self, cluster: Cluster) -> None:
        self.said = cluster.said

    def lose(self, name: str) -> None:
        self.said.append(f"lose {name}")

    def add(self, *shapes: object) -> None:
        self.said += [f"add {shape.name}" for shape in shapes]


def test_the_fullest_node_is_lost_and_back_before_the_deployment_goes(module, monkeypatch) -> None:
    environment = module("environment")
    cluster = Cluster(["node-0", "node-2", "node-1", "node-2"])
    found = environment.Stage(cluster, Nodes(cluster), None)
    monkeypatch.setattr(environment.Stage, "until_ready", lambda self: None)
    with found.serving({}):
        found.lose_node()
    assert cluster.said == ["apply", "lose node-2", "add node-2", "delete"]
    with found.serving({}):
        pass
    assert cluster.said[4:] == ["apply", "delete"], "nodes that were never lost are left alone"
