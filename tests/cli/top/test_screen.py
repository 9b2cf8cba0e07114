"""What `cleave top` shows, and that it fits."""

import io
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cleave.cli.top.screen import print_plain, render_screen
from cleave.cli.top.view import TopView, ViewBuilder, build_document
from cleave.rpc.fleet_status import CacheHits, FleetInstance, FleetStatus, KvPath
from cleave.traffic.counters import Buckets, GatewayCounters

NOON = 1_800_000_000.0
GOOD = KvPath(verified=True, transport="nixl over tcp", bytes_per_s=1.2e9)


def make_instance(name: str, role: str = "decode", **fields: Any) -> FleetInstance:
    known = {"home": role, "state": "ready", "contact": "fresh", "kv_path": GOOD}
    return FleetInstance(name, "chat", "m", role=role, **{**known, **fields})


def replace_instance(instance: FleetInstance, **fields: Any) -> FleetInstance:
    return msgspec.structs.replace(instance, **fields)


def count(at_s: float, requests: float) -> GatewayCounters:
    """Nine in ten within 400 ms, each of 20 tokens."""
    return GatewayCounters(
        at_s=at_s,
        started_s=NOON - 100,
        requests=requests,
        output_tokens=20 * requests,
        measured=requests,
        attained=0.9 * requests,
        ttft=Buckets((0.3, 0.5, float("inf")), (0.5 * requests, requests, requests)),
        tpot=Buckets((0.02, 0.04, float("inf")), (0.0, requests, requests)),
        in_flight=23,
        waiting=4,
        ttft_target_ms=400,
        tpot_target_ms=40,
    )


PAIR = make_instance("chat-prefill-0", "prefill"), make_instance("chat-decode-0")


@pytest.fixture
def view() -> TopView:
    watcher = ViewBuilder()
    watcher.update(FleetStatus(PAIR), count(0.0, 1_000), NOON - 10)
    return watcher.update(FleetStatus(PAIR), count(10.0, 1_100), NOON)


def draw(view: TopView, width: int = 120, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(render_screen(view, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def find(lines: list[str], first: str) -> list[str]:
    (found,) = [line for line in lines if line.split()[:1] == [first]]
    return found.split()


def test_traffic_stands_beside_its_targets(view: TopView) -> None:
    lines = draw(view)
    assert lines[0] == "chat  m"
    assert "in flight 23  waiting 4  instances ready 2 of 2" in lines[1]
    row = ["10", "s", "10.0", "200", "90.0%", "9.0", "300", "460", "30.0", "38.0"]
    assert [line.split() for line in lines].count(row) == 1, "both windows reach as far back"
    assert not any("are of" in line for line in lines), "all were measured"
    assert find(lines, "all")[:3] == ["all", "11.0", "220"]
    assert find(lines, "target") == ["target", "400", "40.0"]


def test_counts_are_of_the_window_that_was_seen(view: TopView) -> None:
    assert any(line.endswith("flips 0 (total 0)  in 10 s") for line in draw(view))


def test_after_one_look_there_are_no_rates_but_the_instances() -> None:
    view = ViewBuilder().update(FleetStatus(PAIR), GatewayCounters(started_s=NOON + 5), NOON)
    lines = draw(view)
    for window in ("5", "60", "all"):
        assert set(find(lines, window)[1:]) - {"s"} == {"-"}
    assert find(lines, "chat-decode-0")
    assert build_document(view)["now"] is None


def test_both_windows_are_shown_as_soon_as_they_differ() -> None:
    watcher = ViewBuilder()
    for at_s in (0.0, 10.0, 16.0):
        view = watcher.update(FleetStatus(PAIR), count(at_s, 100 * at_s), NOON + at_s)
    lines = draw(view)
    assert find(lines, "6")
    assert find(lines, "16")


def test_it_is_said_of_how_many_requests_targets_are_measured() -> None:
    watcher = ViewBuilder()
    watcher.update(FleetStatus(PAIR), GatewayCounters(started_s=NOON - 100), NOON)
    whole = replace(count(10.0, 100), measured=0, attained=0)
    for measured, line in ((0, "0% of the requests"), (40, "40% of the requests")):
        view = watcher.update(FleetStatus(PAIR), replace(whole, measured=measured), NOON + 10)
        lines = draw(view)
        assert any(line in each for each in lines)
        assert find(lines, "10")[4:6] == (["-", "-"] if not measured else ["0.0%", "0.0"])
    untargeted = replace(whole, ttft_target_ms=None, tpot_target_ms=None)
    lines = draw(watcher.update(FleetStatus(PAIR), untargeted, NOON + 10))
    assert not any("of the requests" in line for line in lines)


def test_a_flipped_instance_is_marked_and_its_change_is_shown() -> None:
    watcher = ViewBuilder()
    watcher.update(FleetStatus(PAIR), count(0.0, 0), NOON)
    away = replace_instance(PAIR[1], role="mixed")
    view = watcher.update(FleetStatus((PAIR[0], away)), count(1.0, 0), NOON + 1)
    lines = draw(view)
    assert find(lines, "chat-decode-0")[1] == "decode→mixed"
    assert lines[-1].endswith("chat-decode-0: decode → mixed")
    later = watcher.update(FleetStatus(PAIR), count(2.0, 0), NOON + 2)
    assert [change.role for change in later.changes] == ["decode", "mixed"], "the last one first"


def test_only_the_last_changes_are_remembered() -> None:
    watcher = ViewBuilder()
    for number, role in enumerate(["decode", "mixed"] * 50):
        page = FleetStatus((replace_instance(PAIR[1], role=role),))
        view = watcher.update(page, count(float(number), 0), NOON + number)
    assert len(view.changes) == 5
    assert view.changes[0].at == NOON + 99


def test_gateways_without_home_roles_mark_no_instance(view: TopView) -> None:
    old = FleetStatus(tuple(replace_instance(each, home="") for each in PAIR))
    assert find(draw(replace(view, fleet=old)), "chat-decode-0")[1] == "decode"


def test_the_reason_an_instance_is_not_ready_is_shown(view: TopView) -> None:
    page = FleetStatus(
        (
            make_instance("a", state="starting", reason="engine lost: exit code 1"),
            make_instance("b", contact="connection lost"),
            make_instance("c", kv_path=KvPath()),
        )
    )
    lines = draw(replace(view, fleet=page))
    assert "ready 1 of 3" in lines[1]
    assert find(lines, "a")[2] == "starting"
    assert "connection lost" in " ".join(find(lines, "b"))
    assert find(lines, "c")[-2:] == ["not", "verified"]
    assert lines[-1] == "a: engine lost: exit code 1"


def test_instances_with_other_weights_are_named(view: TopView) -> None:
    one, other = PAIR
    same = (replace_instance(each, weights="a1", weights_read_s=NOON) for each in PAIR)
    assert "weights" not in "".join(draw(replace(view, fleet=FleetStatus(tuple(same)))))
    differing = (
        replace_instance(one, weights="a1", weights_read_s=NOON),
        replace_instance(other, weights="b2", weights_read_s=NOON + 5),
    )
    lines = draw(replace(view, fleet=FleetStatus(differing)), width=200)
    assert any(
        line.startswith("1 of 2 instances have loaded other weights than b2") for line in lines
    )


def test_the_kv_bar_is_empty_full_or_between(view: TopView) -> None:
    shares = {"none": 0.0, "little": 0.01, "half": 0.5, "full": 1.0, "wrong": 1.7}
    page = FleetStatus(tuple(make_instance(n, kv_cache_usage=u) for n, u in shares.items()))
    lines = draw(replace(view, fleet=page))
    bars = {name: find(lines, name)[7].count("█") for name in shares}
    assert bars == {"none": 0, "little": 1, "half": 5, "full": 10, "wrong": 10}


@pytest.mark.parametrize(
    ("hits", "shown"),
    [
        (CacheHits(None, None), []),
        (CacheHits(0.5, None), []),
        (CacheHits(None, 0.62), ["62"]),
        (CacheHits(0.7, 0.62), ["62"]),
        (CacheHits(0.81, 0.3), ["30", "not", "81"]),
    ],
)
def test_the_hit_share_is_shown_with_the_predicted_one_where_they_part(
    view: TopView, hits: CacheHits, shown: list[str]
) -> None:
    page = FleetStatus((make_instance("a", cache_hits=hits),))
    lines = draw(replace(view, fleet=page))
    (heading,) = [line for line in lines if line.startswith("INSTANCE")]
    assert "HIT%" in heading
    cells = find(lines, "a")
    assert cells[8 : 8 + len(shown)] == shown
    assert len(cells) == 15 + len(shown)


def test_a_gateway_that_has_gone_leaves_what_it_said_last(view: TopView) -> None:
    lines = draw(replace(view, fault="connection refused"))
    assert lines[1].endswith("no response since then: connection refused")
    assert find(lines, "chat-decode-0")
    assert build_document(replace(view, fault="gone"))["fault"] == "gone"


@pytest.mark.parametrize("width", [50, 80, 100, 160])
def test_columns_leave_until_the_rest_fits(view: TopView, width: int) -> None:
    page = FleetStatus(tuple(make_instance(f"chat-decode-{n:06x}") for n in range(8)))
    lines = draw(replace(view, fleet=page), width)
    (heading,) = [line for line in lines if line.startswith("INSTANCE")]
    assert heading.split()[:5] == ["INSTANCE", "ROLE", "STATE", "RUN", "WAIT"]
    assert ("KV PATH" in heading) == (width >= 120)
    assert ("PENDING" in heading) == (width >= 80)
    assert max(map(len, lines)) <= width
    assert all("…" not in line for line in lines if line.startswith("chat-decode"))


@pytest.mark.parametrize("height", [24, 30, 60])
def test_of_many_instances_those_stay_that_somebody_should_look_at(
    view: TopView, height: int
) -> None:
    many = [make_instance(f"d{n:04}", kv_cache_usage=n / 1e4) for n in range(4_000)]
    many[17] = make_instance("d0017", state="verifying", reason="KV path is tested")
    many[18] = make_instance("d0018", role="mixed", home="decode")
    page = FleetStatus(tuple(many), left_out=96)
    lines = draw(replace(view, fleet=page), 80, height)
    assert len(lines) == height
    names = [line.split()[0] for line in lines if re.match(r"d\d{4} ", line)]
    assert names[:2] == ["d0017", "d0018"]
    assert f"and {4_096 - len(names)} more" in lines


def test_in_print_nothing_is_left_out_but_what_the_gateway_leaves_out(view: TopView) -> None:
    page = FleetStatus(tuple(make_instance(f"d{n:04}") for n in range(200)), left_out=7)
    out = io.StringIO()
    print_plain(Console(file=out, width=40, highlight=False), replace(view, fleet=page))
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("d0") for line in lines) == 200
    assert sum("nixl over tcp 1.2 GB/s" in line for line in lines) == 200
    assert "and 7 more" in lines
