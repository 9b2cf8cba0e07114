"""Load accounting that several processes share: here several routers on one table."""

import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave.api.enums import DispatchPolicy
from cleave.policy.prefix_cache import CLOCK_TOKENS
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick, RequestPhase, Router, SharedRouter
from cleave.router.score_table import ScoreTable
from cleave.router.shared_load import MAX_BOOTS, SharedInFlightLoad, SharedLoad, build_table
from cleave.router.shared_score_table import ChangeLogScoreTable
from cleave.rpc.v1 import agent_pb2

PROCESSES = 3
FLEET = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "m1": "mixed"}
MANY = FLEET | {
    f"{role[0]}{number}": role for role in ("prefill", "decode") for number in range(3, 7)
}
"""More than are all scored for each pick."""


class Together:
    """The routers of all processes of one gateway, and what each has under way."""

    def __init__(
        self,
        make_event: Callable[..., agent_pb2.WatchEvent],
        policy: DispatchPolicy,
        fleet: dict[str, str],
    ) -> None:
        self.table = build_table(PROCESSES)
        self.now = 100.0
        self._make_event, self._policy, self._roles = make_event, policy, fleet
        self._boots = {name: f"{name}-1" for name in fleet}
        self.routers = [self.start(process) for process in range(PROCESSES)]
        self.under_way: list[list[Pick]] = [[] for _ in self.routers]

    def start(self, process: int) -> Router:
        registry = InstanceRegistry(self._policy, SharedLoad(self.table.for_process(process)))
        for name, role in self._roles.items():
            event = self._make_event(name, role, boot_id=self._boots[name])
            registry.on_event(name, event, self.now)
        return SharedRouter(registry, clock=lambda: self.now, seed=1)

    def pick(self, process: int, prompt: int, output: int = 100) -> Pick:
        picked = self.routers[process].pick("m", prompt, output)
        self.under_way[process].append(picked)
        return picked

    def release(self, process: int, which: int, phase: RequestPhase) -> None:
        if some := self.under_way[process]:
            picked = some[which % len(some)]
            self.routers[process].release(picked, phase)
            if not picked.is_open:
                some.remove(picked)

    def die(self, process: int) -> None:
        self.table.clear_process(process)
        self.under_way[process] = []
        self.routers[process] = self.start(process)

    def reboot(self, name: str, boot: int) -> None:
        self._boots[name] = f"{name}-{boot + 2}"
        for router in self.routers:
            event = self._make_event(name, self._roles[name], boot_id=self._boots[name])
            router.registry.on_event(name, event, self.now)

    def in_flight(self, name: str, process: int = 0) -> SharedInFlightLoad:
        found = self.routers[process].registry.instances[name].in_flight
        assert isinstance(found, SharedInFlightLoad)
        return found

    def score_table(self, process: int) -> ScoreTable:
        (table,) = self.routers[process].registry.models["m"].score_tables
        table.refresh()
        return table


@pytest.fixture
def together(make_event) -> Iterator[Callable[..., Together]]:
    fleets: list[Together] = []

    def make(
        policy: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT, fleet: dict[str, str] = FLEET
    ) -> Together:
        fleets.append(Together(make_event, policy, fleet))
        return fleets[-1]

    yield make
    for each in fleets:
        each.table.close()


def test_each_process_sees_at_once_what_the_others_have_sent(together) -> None:
    fleet = together()
    assert {fleet.pick(process, 1000).prefill.instance for process in (0, 1)} == {"p1", "p2"}
    assert fleet.pick(2, 10).reason == "mixed"


def test_what_each_process_counts_of_a_cache_all_add_up(together) -> None:
    fleet = together()
    name = next(iter(FLEET))
    for process in range(PROCESSES):
        in_flight = fleet.in_flight(name, process)
        in_flight.count_prompt(1_000.0, 800.0, 600.0)
        in_flight.count_loaded(200.0)
        in_flight.count_written(400.0)
    for process in range(PROCESSES):
        in_flight = fleet.in_flight(name, process)
        assert in_flight.predict_hits() == (1_000 * PROCESSES, 800 * PROCESSES, 600 * PROCESSES)
        assert in_flight.predict_loaded() == 200 * PROCESSES
        assert in_flight.read_clock() == 400 * PROCESSES // CLOCK_TOKENS
    fleet.die(0)
    assert fleet.in_flight(name, 0).predict_loaded() == 200 * PROCESSES, "still in the engine"


def test_idle_instances_are_picked_in_turn_over_all_processes(together) -> None:
    """Each begins with the first otherwise, and the last ones never get anything."""
    for policy in (
        DispatchPolicy.ROUND_ROBIN,
        DispatchPolicy.SHORTEST_WAIT,
        DispatchPolicy.LEAST_REQUESTS,
    ):
        fleet = together(policy)
        for turn in range(6):
            picked = fleet.pick(turn % PROCESSES, 10)
            assert picked.prefill.instance == ("p1", "p2")[turn % 2]
            fleet.release(turn % PROCESSES, 0, RequestPhase.ALL)


@pytest.mark.parametrize("roles", [FLEET, MANY], ids=["few", "many"])
def test_what_a_dead_process_had_under_way_is_not_counted_any_more(together, roles) -> None:
    fleet = together(fleet=roles)
    for process in range(PROCESSES):
        for _ in range(4):
            fleet.pick(process, 500)
    before = [fleet.in_flight(name).prompt.pending for name in roles]
    fleet.table.clear_process(1)
    after = [fleet.in_flight(name).prompt.pending for name in roles]
    assert sum(after) == pytest.approx(sum(before) * 2 / 3)
    assert sorted(fleet.score_table(2).pending_prompt.to_list()) == sorted(after)
    for process in (0, 2):
        while fleet.under_way[process]:
            fleet.release(process, 0, RequestPhase.ALL)
    assert [fleet.in_flight(name).resident.pending for name in roles] == [0.0] * len(roles)


def test_what_reports_count_of_siblings_is_not_counted_twice(together, loaded) -> None:
    fleet = together()
    picked = fleet.pick(0, 1000).prefill.instance
    for router in fleet.routers:
        router.registry.on_event(picked, loaded(picked, 1000, boot_id=f"{picked}-1"), fleet.now)
    assert fleet.in_flight(picked).prompt.pending == 1000
    event = loaded(picked, 1700, boot_id=f"{picked}-1")
    fleet.routers[1].registry.on_event(picked, event, fleet.now)
    assert [fleet.in_flight(picked, process).prompt.pending for process in range(3)] == [1700] * 3


@pytest.mark.interpreted
def test_who_chooses_at_the_same_time_as_a_sibling_chooses_again(together, monkeypatch) -> None:
    """The second one has read the scores before the first one has entered its choice."""
    fleet = together(fleet=MANY)
    refresh, faster = ChangeLogScoreTable.refresh, []

    def refresh_early(table: ChangeLogScoreTable) -> None:
        refresh(table)
        monkeypatch.setattr(ChangeLogScoreTable, "refresh", refresh)
        faster.append(fleet.pick(1, 1000).prefill.instance)

    monkeypatch.setattr(ChangeLogScoreTable, "refresh", refresh_early)
    assert (faster, fleet.pick(0, 1000).prefill.instance) == (["p1"], "p2")


@pytest.mark.parametrize("roles", [FLEET, MANY], ids=["few", "many"])
def test_the_admission_check_is_not_reused_after_a_change(together, roles) -> None:
    fleet = together(fleet=roles)
    fleet.pick(0, 10)
    fleet.score_table(0).find_shortest_queue()
    busy = fleet.pick(1, 1000).prefill.instance
    fleet.release(0, 0, RequestPhase.ALL)
    assert find_first(fleet.pick(0, 10)) != busy


def test_late_releases_of_an_earlier_boot_change_nothing(together) -> None:
    fleet = together()
    picked = fleet.pick(0, 1000)
    name = picked.prefill.instance
    fleet.reboot(name, 2)
    assert fleet.in_flight(name).prompt.pending == 0.0
    fleet.now += 1
    since = fleet.in_flight(name).queue.head_started_ms
    fleet.routers[0].release(picked, RequestPhase.PREFILL)
    assert (fleet.in_flight(name).prompt.pending, fleet.in_flight(name).queue.head_started_ms) == (
        0.0,
        since,
    )
    assert fleet.in_flight(name).count_requests() == 0


def test_the_speed_that_one_process_has_learnt_all_know(together) -> None:
    fleet = together()
    for _ in range(50):
        picked = fleet.pick(0, 1000)
        fleet.now += 1.0
        fleet.routers[0].release(picked)
        picked = fleet.pick(0, 1000)
        fleet.now += 1.0
        fleet.routers[0].release(picked, RequestPhase.PREFILL)
        fleet.routers[0].release(picked)
    for process in (0, 2):
        fleet.in_flight("p2", process).sync()
    assert fleet.in_flight("p2", 2).queue.token_ms > 0.5
    assert fleet.in_flight("p2", 2).queue.token_ms == fleet.in_flight("p2", 0).queue.token_ms


def test_an_instance_that_one_process_does_not_hear_is_still_open_to_the_others(together) -> None:
    fleet = together()
    for router in fleet.routers[:1]:
        router.registry.on_disconnect("p1")
    assert "p1" not in {find_first(fleet.pick(0, 10)) for _ in range(4)}
    assert "p1" in {find_first(fleet.pick(1, 10)) for _ in range(4)}


def find_both(pick: Pick) -> tuple[str, str]:
    return find_first(pick), pick.decode.instance


def find_first(pick: Pick) -> str:
    return (pick.prefill or pick.decode).instance


def test_more_boots_than_there_is_room_for_share_a_row_and_are_served(make_event) -> None:
    table = build_table(1)
    for number in range(MAX_BOOTS - 2):
        assert table.for_process(0).claim(b"%d" % number) is not None
    registry = InstanceRegistry(shared_load=SharedLoad(table.for_process(0)))
    for name in ("a", "b"):
        registry.on_event(name, make_event(name, "mixed"), 0.0)
    router = SharedRouter(registry, clock=lambda: 1.0, seed=1)
    picks = [router.pick("m", 100) for _ in range(4)]
    for name in ("a", "b"):
        registry.remove_agent(name)
    for pick in picks:
        router.release(pick)
    assert sum(table.read(0, 0)) == sum(table.read(0, 2)) == 0
    table.close()


def test_what_is_written_anew_is_never_seen_as_nothing() -> None:
    """As if places were cleared before they are filled, which Struct.pack_into() does."""
    subprocess.run([sys.executable, "-c", WRITING], check=True, timeout=120)


WRITING = """
import os
import signal

from cleave.router.shared_load import SharedLoad, build_table

table = build_table(2)
child = os.fork()
if not child:
    in_flight = SharedLoad(table.for_process(0)).open("a", "1")
    in_flight.prompt.add(1000.0)
    while True:
        in_flight.publish()
        in_flight.queue.observe_completion(1000.0, 1.0)
try:
    in_flight = SharedLoad(table.for_process(1)).open("a", "1")
    while not in_flight.prompt.pending:
        assert not os.waitpid(child, os.WNOHANG)[0]
    for _ in range(50_000):
        assert in_flight.prompt.pending == 1000.0
        assert in_flight.queue.count_prompts(1000.0) > 0.0
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["pick", "pick", "pick", "prefill", "whole", "whole", "die", "reboot"]),
        st.integers(0, PROCESSES - 1),
        st.integers(1, 3000),
    ),
    max_size=60,
)


@pytest.mark.parametrize("roles", [FLEET, MANY], ids=["few", "many"])
@pytest.mark.parametrize("policy", [DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.LEAST_REQUESTS])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=ACTIONS)
def test_sums_are_never_negative_and_all_processes_agree(
    make_event, policy, roles, actions
) -> None:
    fleet = Together(make_event, policy, roles)
    try:
        for boot, (action, process, number) in enumerate(actions):
            fleet.now += 0.01
            if action == "pick":
                fleet.pick(process, number, number)
            elif action in ("prefill", "whole"):
                phase = RequestPhase.PREFILL if action == "prefill" else RequestPhase.ALL
                fleet.release(process, number, phase)
            elif action == "die":
                fleet.die(process)
            else:
                fleet.reboot(sorted(roles)[number % len(roles)], boot)
            check(fleet, roles)
        for process in range(PROCESSES):
            while fleet.under_way[process]:
                fleet.release(process, 0, RequestPhase.ALL)
        for name in roles:
            in_flight = fleet.in_flight(name)
            assert in_flight.prompt.pending < 1e-6
            assert in_flight.resident.pending < 1e-6
            assert in_flight.count_requests() == 0
            assert in_flight.count_prompts(0.0) == pytest.approx(0, abs=1e-6)
    finally:
        fleet.table.close()


def check(fleet: Together, names: Collection[str]) -> None:
    for name in names:
        views = {
            (
                each.prompt.pending,
                each.count_prompts(each.prompt.pending),
                each.resident.pending,
                each.count_requests(),
            )
            for each in (fleet.in_flight(name, process) for process in range(PROCESSES))
        }
        assert len(views) == 1
        assert min(views.pop()) >= 0
    first, *others = (fleet.score_table(process) for process in range(PROCESSES))
    for other in others:
        assert first.prefill.to_list() == other.prefill.to_list()
        assert first.decode.to_list() == other.decode.to_list()


@pytest.mark.parametrize("roles", [FLEET, MANY], ids=["few", "many"])
def test_together_they_choose_as_one_would(make_event, roles) -> None:
    """The same requests through one router and through three that share load accounting."""
    fleet = Together(make_event, DispatchPolicy.SHORTEST_WAIT, roles)
    registry = InstanceRegistry()
    for name, role in roles.items():
        registry.on_event(name, make_event(name, role), fleet.now)
    alone = Router(registry, clock=lambda: fleet.now, seed=1)
    rng = random.Random(5)
    under_way: list[tuple[int, Pick, Pick]] = []
    for number in range(400):
        fleet.now += rng.expovariate(20)
        if under_way and rng.random() < 0.5:
            process, shared, single = under_way.pop(rng.randrange(len(under_way)))
            for phase in (RequestPhase.PREFILL, RequestPhase.DECODE):
                fleet.routers[process].release(shared, phase)
                alone.release(single, phase)
        process, prompt = rng.randrange(PROCESSES), rng.randrange(1, 4000)
        shared, single = fleet.routers[process].pick("m", prompt, 64), alone.pick("m", prompt, 64)
        assert find_both(shared) == find_both(single), number
        under_way.append((process, shared, single))
    fleet.table.close()
