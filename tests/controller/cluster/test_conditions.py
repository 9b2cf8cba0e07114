"""Conditions: their transition times and messages."""

from cleave.controller.cluster.actions import Emit, ObjectReference
from cleave.controller.cluster.conditions import ConditionState, build_events, is_true, merge

CHAT = ObjectReference("LLMDeployment", "llm", "chat", "u1")
NOT_READY = ConditionState("Ready", False, "NotReady", "0 of 1 instances are ready")
READY = ConditionState("Ready", True, "Ready", "1 of 1 instances are ready")


def test_the_time_of_a_condition_moves_with_its_status_only() -> None:
    first = merge([], [NOT_READY], 1, now_s=0)
    assert first[0]["lastTransitionTime"] == "1970-01-01T00:00:00Z"
    other = ConditionState("Ready", False, "Broken", "no")
    second = merge(first, [other], 2, now_s=60)
    assert second[0]["lastTransitionTime"] == "1970-01-01T00:00:00Z"
    assert (second[0]["reason"], second[0]["observedGeneration"]) == ("Broken", 2)
    third = merge(second, [READY], 2, now_s=120)
    assert third[0]["lastTransitionTime"] == "1970-01-01T00:02:00Z"


def test_the_unknown_is_neither_true_nor_false() -> None:
    (written,) = merge([], [ConditionState("KVPathVerified", None, "NotReported")], 1, now_s=0)
    assert written["status"] == "Unknown"
    assert not is_true([written], "KVPathVerified")


def test_events_report_each_change_once() -> None:
    before = merge([], [NOT_READY], 1, now_s=0)
    assert list(build_events(CHAT, before, [READY])) == [Emit(CHAT, "Ready", READY.message)]
    assert list(build_events(CHAT, merge(before, [READY], 1, now_s=1), [READY])) == []


def test_what_gets_worse_is_a_warning() -> None:
    before = merge([], [READY, ConditionState("Degraded", False, "Complete")], 1, now_s=0)
    worse = [NOT_READY, ConditionState("Degraded", True, "TooFew", "2 are missing")]
    assert [(each.reason, each.is_warning) for each in build_events(CHAT, before, worse)] == [
        ("NotReady", True),
        ("TooFew", True),
    ]


def test_a_roll_out_is_no_warning_and_the_loss_of_service_is_one() -> None:
    serving = ConditionState("Available", True, "Serving", "requests are served")
    begun = [
        ConditionState("Ready", False, "RollingOut", "generation 2 is not rolled out"),
        serving,
        ConditionState("Progressing", True, "RollingOut", "decode instances: replaced"),
    ]
    lost = [
        ConditionState("Ready", False, "DecodeNotReady", "0 of 2"),
        ConditionState("Available", False, "DecodeNotReady", "0 of 2"),
        begun[2],
    ]
    done = [
        READY,
        serving,
        ConditionState("Progressing", False, "Settled", "all is as it should be"),
    ]
    last = merge([], done, 1, now_s=0)
    reasons = []
    for now in (begun, lost, begun, done):
        reasons.append([(each.reason, each.is_warning) for each in build_events(CHAT, last, now)])
        last = merge(last, now, 1, now_s=0)
    assert reasons == [
        [("RollingOut", False)],
        [("DecodeNotReady", True)],
        [("Serving", False)],
        [("Ready", False), ("Settled", False)],
    ]


def test_the_end_of_an_outage_is_reported_once() -> None:
    lost = [
        ConditionState(kind, False, "DecodeNotReady", "0 of 2") for kind in ("Ready", "Available")
    ]
    back = [ConditionState(kind, True, "Serving", "served") for kind in ("Ready", "Available")]
    assert list(build_events(CHAT, merge([], lost, 1, now_s=0), back)) == [
        Emit(CHAT, "Serving", "served")
    ]


def test_the_planner_at_work_is_no_bad_news() -> None:
    before = merge([], [ConditionState("PlanReady", True, "Planned", "2P")], 1, now_s=0)
    (planning,) = build_events(
        CHAT, before, [ConditionState("PlanReady", False, "Planning", "at work")]
    )
    assert not planning.is_warning


def test_progress_events_report_only_begin_and_end_of_a_rollout() -> None:
    moving, rolling, done = (
        ConditionState("Progressing", True, "Scaling", "decode instances start or end"),
        ConditionState(
            "Progressing", True, "RollingOut", "decode instances: replaced by revision b"
        ),
        ConditionState("Progressing", False, "Settled", "all instances are as desired"),
    )
    last: list = []
    reasons = []
    for now in (moving, done, rolling, rolling, done, moving, done):
        reasons += [(each.reason, each.is_warning) for each in build_events(CHAT, last, [now])]
        last = merge(last, [now], 1, now_s=0)
    assert reasons == [("RollingOut", False), ("Settled", False)]


def test_a_new_object_that_is_not_ready_is_no_news_and_its_plan_is() -> None:
    new = [
        NOT_READY,
        ConditionState("PlanReady", False, "Planning", "the planner is running"),
        ConditionState("Degraded", False, "Complete"),
        ConditionState("Progressing", True, "New"),
    ]
    assert [(each.reason, each.is_warning) for each in build_events(CHAT, [], new)] == [
        ("Planning", False)
    ]


def test_another_reason_is_news_only_where_it_says_something() -> None:
    before = merge([], [NOT_READY, ConditionState("PlanReady", False, "Planning")], 1, now_s=0)
    other = [
        ConditionState("Ready", False, "GatewayNotReady", "no gateway"),
        ConditionState("PlanReady", False, "Infeasible", "too few GPUs"),
    ]
    assert [(each.reason, each.is_warning) for each in build_events(CHAT, before, other)] == [
        ("Infeasible", True)
    ]
