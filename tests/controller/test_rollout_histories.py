"""What holds of every roll-out, over many histories in which instances come, fail and drain."""

import random
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.role import Role
from cleave.controller.rollout.planner import (
    InstanceCount,
    RoleState,
    RolloutLimits,
    RolloutStep,
    compute_capacity,
    is_done,
    list_steps,
    plan_next_step,
)

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


class RolloutSimulation:
    """Instances that start, become ready, are lost and drain, below `plan_next_step`."""

    def __init__(self, sizes: dict[Role, int], limits: RolloutLimits, seed: int) -> None:
        self.sizes, self.limits = sizes, limits
        self.random = random.Random(seed)
        self.target, self.revisions = "r0", ["r0"]
        self.leaving = dict.fromkeys(sizes, 0)
        self.pods: dict[Role, list[tuple[str, bool]]] = {
            role: [("r0", True)] * n for role, n in sizes.items()
        }

    def states(self) -> dict[Role, RoleState]:
        return {role: self._state(role) for role in self.sizes}

    def _state(self, role: Role) -> RoleState:
        counts = {
            name: InstanceCount(
                sum(pod[0] == name for pod in self.pods[role]),
                sum(pod == (name, True) for pod in self.pods[role]),
            )
            for name in self.revisions
        }
        new = counts.pop(self.target)
        return RoleState(
            replicas=self.sizes[role],
            old=sum(count.total for count in counts.values()),
            old_ready=sum(count.ready for count in counts.values()),
            new=new.total,
            new_ready=new.ready,
            leaving=self.leaving[role],
            older={name: count for name, count in counts.items() if count.total},
        )

    def total(self, role: Role) -> int:
        return len(self.pods[role]) + self.leaving[role]

    def reconcile(self) -> dict[Role, RolloutStep]:
        """One step, carried out."""
        step = plan_next_step(self.states(), self.limits)
        for role, each in step.items():
            for name, keep in {self.target: each.new, **each.older}.items():
                candidates = sorted(pod for pod in self.pods[role] if pod[0] == name)
                for pod in candidates[: max(0, len(candidates) - keep)]:
                    self.pods[role].remove(pod)
                    self.leaving[role] += 1
                added = keep - len(candidates) if name == self.target else 0
                self.pods[role] += [(name, False)] * added
        return step

    def happen(self, event: str) -> None:
        """Something that is not ours to decide."""
        if event == "ready":
            self._turn(lambda pod: self.random.random() < 0.6)
        elif event == "all ready":
            self._turn(lambda pod: True)
        elif event == "gone":
            self.leaving = {role: self.random.randint(0, n) for role, n in self.leaving.items()}
        elif event == "retarget":
            self.target = f"r{len(self.revisions)}"
            self.revisions.append(self.target)
        elif event == "back":
            self.target = self.random.choice(self.revisions)
        elif event == "scale":
            self.sizes = {role: self.random.randint(0, 6) for role in self.sizes}
        elif event == "loss":
            for role in self.sizes:
                if self.pods[role] and self.random.random() < 0.5:
                    self.pods[role].remove(self.random.choice(self.pods[role]))
        elif event == "blip":
            for role in self.sizes:
                if self.pods[role] and self.random.random() < 0.5:
                    pod = self.random.choice(self.pods[role])
                    self.pods[role].remove(pod)
                    self.pods[role].append((pod[0], False))

    def _turn(self, chosen) -> None:
        for role, pods in self.pods.items():
            self.pods[role] = [(name, is_ready or chosen(name)) for name, is_ready in pods]

    def settle(self) -> int:
        """Reconciles until nothing is left to do, when all becomes ready."""
        desired_total = sum(self.sizes.values()) + sum(self.total(role) for role in self.sizes)
        for count in range(4 + 2 * desired_total):
            if is_done(self.states()):
                return count
            self.reconcile()
            self.happen("all ready")
            self.leaving = dict.fromkeys(self.sizes, 0)
        raise AssertionError(f"not done after {4 + 2 * desired_total} steps: {self.states()}")


ROLES = st.sampled_from([(P, D), (M,), (P, D, M), (P, M), (D,)])
ORDINARY = ["ready", "ready", "all ready", "gone", "gone", "retarget", "back"]
FAULTS = ["loss", "blip"]


@st.composite
def worlds(
    draw: st.DrawFn, least: int = 0, events: tuple[str, ...] = ()
) -> tuple[RolloutSimulation, list[str]]:
    roles = draw(ROLES)
    sizes = {role: draw(st.integers(least, 6)) for role in roles}
    surge = draw(st.integers(0, 3))
    unavailable = draw(st.integers(0 if surge else 1, 2))
    skew = draw(st.sampled_from([0.0, 0.25, 1.0]))
    limits = RolloutLimits(surge, unavailable, skew)
    simulation = RolloutSimulation(sizes, limits, draw(st.integers(0, 2**16)))
    return simulation, draw(st.lists(st.sampled_from([*ORDINARY, *events]), max_size=30))


def floor(simulation: RolloutSimulation) -> Fraction:
    """Share of the plan that has to stay: each role may miss maxUnavailable instances."""
    sizes = [size for size in simulation.sizes.values() if size]
    if not any(size for role, size in simulation.sizes.items() if role is not P):
        return Fraction(0)
    allowed = Fraction(simulation.limits.max_unavailable, max(sizes))
    if simulation.limits.max_surge == 0:
        allowed = max(allowed, Fraction(1, min(sizes)))
    return max(Fraction(0), 1 - allowed)


def one_of_each(simulation: RolloutSimulation) -> Fraction:
    """What one instance of each role is worth."""
    return sum((Fraction(1, size) for size in simulation.sizes.values() if size), Fraction(0))


@given(worlds(events=("scale", *FAULTS)))
def test_capacity_that_was_there_stays(drawn: tuple[RolloutSimulation, list[str]]) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        before = simulation.states()
        old = {name for state in before.values() for name in state.older}
        simulation.reconcile()
        bound = floor(simulation) - (one_of_each(simulation) if len(old) > 1 else 0)
        if compute_capacity(before) >= floor(simulation):
            assert compute_capacity(simulation.states()) >= float(bound) - 1e-9


@given(worlds(events=("scale", *FAULTS)))
def test_no_role_misses_more_than_it_may(drawn: tuple[RolloutSimulation, list[str]]) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        before = simulation.states()
        simulation.reconcile()
        for role, state in simulation.states().items():
            least = state.replicas - simulation.limits.max_unavailable
            was_available = before[role].old_ready + before[role].new_ready >= least
            # Prefill instances without partners count for nothing.
            if role is not P and was_available and len(before[role].older) < 2:
                assert state.old_ready + state.new_ready >= least


@given(worlds(least=1))
def test_even_three_revisions_cost_no_more_than_one_instance_of_each_role(
    drawn: tuple[RolloutSimulation, list[str]],
) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        simulation.reconcile()
        assert (
            compute_capacity(simulation.states())
            >= float(floor(simulation) - one_of_each(simulation)) - 1e-9
        )


@given(worlds(events=("scale", *FAULTS)))
def test_a_role_never_takes_more_than_its_places(
    drawn: tuple[RolloutSimulation, list[str]],
) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        before = {role: simulation.total(role) for role in simulation.sizes}
        simulation.reconcile()
        for role, size in simulation.sizes.items():
            assert simulation.total(role) <= max(before[role], size + simulation.limits.max_surge)


@given(worlds(least=1))
def test_no_revision_has_prefill_instances_alone(
    drawn: tuple[RolloutSimulation, list[str]],
) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        simulation.reconcile()
        if P not in simulation.sizes:
            continue
        for name in simulation.revisions:
            has = {
                role: any(pod[0] == name for pod in pods) for role, pods in simulation.pods.items()
            }
            assert not has.pop(P) or any(has.values()), f"{name} has nobody to hand over to"


@settings(max_examples=200)
@given(worlds(events=("scale", *FAULTS)))
def test_every_history_ends_where_it_should(drawn: tuple[RolloutSimulation, list[str]]) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        simulation.reconcile()
    simulation.settle()
    assert all(
        simulation.pods[role] == [(simulation.target, True)] * size
        for role, size in simulation.sizes.items()
    )


@given(worlds(events=("scale",)))
def test_the_way_back_is_open_from_everywhere(drawn: tuple[RolloutSimulation, list[str]]) -> None:
    simulation, events = drawn
    for event in events:
        simulation.happen(event)
        simulation.reconcile()
    simulation.target = "r0"
    simulation.settle()
    assert all(
        simulation.pods[role] == [("r0", True)] * size for role, size in simulation.sizes.items()
    )


@given(worlds(events=("scale", *FAULTS)))
def test_what_is_done_stays_as_it_is(drawn: tuple[RolloutSimulation, list[str]]) -> None:
    simulation, _ = drawn
    simulation.happen("scale")
    simulation.settle()
    states = simulation.states()
    step = plan_next_step(states, simulation.limits)
    assert {role: (each.new, each.old) for role, each in step.items()} == {
        role: (size, 0) for role, size in simulation.sizes.items()
    }
    assert list(list_steps(states, simulation.limits)) == []


@given(worlds(least=1))
def test_separate_revisions_and_one_old_revision_agree(
    drawn: tuple[RolloutSimulation, list[str]],
) -> None:
    simulation, _ = drawn
    simulation.happen("retarget")
    apart = simulation.states()
    together = {role: replace(state, older={}) for role, state in apart.items()}
    one, other = (
        plan_next_step(apart, simulation.limits),
        plan_next_step(together, simulation.limits),
    )
    assert {r: (step.new, step.old) for r, step in one.items()} == {
        r: (step.new, step.old) for r, step in other.items()
    }
