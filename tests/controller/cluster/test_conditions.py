"""Conditions: since when, and what people are told."""

from cleave.controller.cluster.actions import Emit, Reference
from cleave.controller.cluster.conditions import Condition, holds, settled, told

CHAT = Reference("LLMDeployment", "llm", "chat", "u1")
NOT_READY = Condition("Ready", False, "NotReady", "0 of 1 instances are ready")
READY = Condition("Ready", True, "Ready", "1 of 1 instances are ready")


def test_the_time_of_a_condition_moves_with_its_status_only() -> None:
    first = settled([], [NOT_READY], 1, now_s=0)
    assert first[0]["lastTransitionTime"] == "1970-01-01T00:00:00Z"
    other = Condition("Ready", False, "Broken", "no")
    second = settled(first, [other], 2, now_s=60)
    assert second[0]["lastTransitionTime"] == "1970-01-01T00:00:00Z"
    assert (second[0]["reason"], second[0]["observedGeneration"]) == ("Broken", 2)
    third = settled(second, [READY], 2, now_s=120)
    assert third[0]["lastTransitionTime"] == "1970-01-01T00:02:00Z"


def test_the_unknown_is_neither_true_nor_false() -> None:
    (written,) = settled([], [Condition("KVPathVerified", None, "NotReported")], 1, now_s=0)
    assert written["status"] == "Unknown"
    assert not holds([written], "KVPathVerified")


def test_people_are_told_of_changes_once() -> None:
    before = settled([], [NOT_READY], 1, now_s=0)
    assert list(told(CHAT, before, [READY])) == [Emit(CHAT, "Ready", READY.message)]
    assert list(told(CHAT, settled(before, [READY], 1, now_s=1), [READY])) == []


def test_what_gets_worse_is_a_warning() -> None:
    before = settled([], [READY, Condition("Degraded", False, "Complete")], 1, now_s=0)
    worse = [NOT_READY, Condition("Degraded", True, "TooFew", "2 are missing")]
    assert [(each.reason, each.is_warning) for each in told(CHAT, before, worse)] == [
        ("NotReady", True),
        ("TooFew", True),
    ]


def test_a_roll_out_is_no_warning_and_the_loss_of_service_is_one() -> None:
    serving = Condition("Available", True, "Serving", "requests are served")
    begun = [
        Condition("Ready", False, "RollingOut", "generation 2 is not rolled out"),
        serving,
        Condition("Progressing", True, "RollingOut", "decode instances: replaced"),
    ]
    lost = [
        Condition("Ready", False, "DecodeNotReady", "0 of 2"),
        Condition("Available", False, "DecodeNotReady", "0 of 2"),
        begun[2],
    ]
    done = [READY, serving, Condition("Progressing", False, "Settled", "all is as it should be")]
    last = settled([], done, 1, now_s=0)
    reasons = []
    for now in (begun, lost, begun, done):
        reasons.append([(each.reason, each.is_warning) for each in told(CHAT, last, now)])
        last = settled(last, now, 1, now_s=0)
    assert reasons == [
        [("RollingOut", False)],
        [("DecodeNotReady", True)],
        [("Serving", False)],
        [("Ready", False), ("Settled", False)],
    ]


def test_the_end_of_an_outage_is_told_once() -> None:
    lost = [Condition(kind, False, "DecodeNotReady", "0 of 2") for kind in ("Ready", "Available")]
    back = [Condition(kind, True, "Serving", "served") for kind in ("Ready", "Available")]
    assert list(told(CHAT, settled([], lost, 1, now_s=0), back)) == [
        Emit(CHAT, "Serving", "served")
    ]


def test_the_planner_at_work_is_no_bad_news() -> None:
    before = settled([], [Condition("PlanReady", True, "Planned", "2P")], 1, now_s=0)
    (planning,) = told(CHAT, before, [Condition("PlanReady", False, "Planning", "at work")])
    assert not planning.is_warning


def test_of_all_progress_only_a_roll_out_is_told_its_begin_and_its_end() -> None:
    moving, rolling, done = (
        Condition("Progressing", True, "Scaling", "decode instances start or end"),
        Condition("Progressing", True, "RollingOut", "decode instances: replaced by revision b"),
        Condition("Progressing", False, "Settled", "all instances are as desired"),
    )
    last: list = []
    reasons = []
    for now in (moving, done, rolling, rolling, done, moving, done):
        reasons += [(each.reason, each.is_warning) for each in told(CHAT, last, [now])]
        last = settled(last, [now], 1, now_s=0)
    assert reasons == [("RollingOut", False), ("Settled", False)]


def test_a_new_object_that_is_not_ready_is_no_news_and_its_plan_is() -> None:
    new = [
        NOT_READY,
        Condition("PlanReady", False, "Planning", "the planner is running"),
        Condition("Degraded", False, "Complete"),
        Condition("Progressing", True, "New"),
    ]
    assert [(each.reason, each.is_warning) for each in told(CHAT, [], new)] == [("Planning", False)]


def test_another_reason_is_news_only_where_it_says_something() -> None:
    before = settled([], [NOT_READY, Condition("PlanReady", False, "Planning")], 1, now_s=0)
    other = [
        Condition("Ready", False, "GatewayNotReady", "no gateway"),
        Condition("PlanReady", False, "Infeasible", "too few GPUs"),
    ]
    assert [(each.reason, each.is_warning) for each in told(CHAT, before, other)] == [
        ("Infeasible", True)
    ]
