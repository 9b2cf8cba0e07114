"""Detects drift of the traffic from the planned one, and selects the windows to compare. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile

from cleave.api.workload import Workload
from cleave.controller.views import DriftState
from cleave.traffic.drift_detector import (
    DriftDetector,
    Quantity,
    TrafficChange,
    TrafficReference,
    update_detector,
)
from cleave.traffic.refit import MIN_REQUESTS
from cleave.traffic.window import TrafficWindow, join_windows


def update(
    state: DriftState,
    planned_for: Workload | None,
    windows: Iterable[TrafficWindow],
    since_s: float | None,
) -> DriftState:
    """Return the state after the new ones of `windows`.

    The state is reset when the planned traffic changes or the fleet becomes stable again
    (`since_s`). Nothing is compared without planned traffic, or while the fleet is not stable. A
    change after which the plan was kept does not hide the next one.
    """
    if (state.planned_workload, state.since_s) != (planned_for, since_s):
        reference = TrafficReference.from_workload(planned_for) if planned_for else None
        state = DriftState(planned_for, since_s, detector=DriftDetector(reference))
    if state.detector.reference is None and state.until_s == 0.0:
        return state
    if since_s is None:
        return state
    detector, change, until_s = state.detector, state.change, state.until_s
    for window in windows:
        if window.start_s >= since_s and window.end_s > until_s:
            detector, detected = update_detector(detector, window)
            change, until_s = detected or change, window.end_s
    return replace(state, detector=detector, change=change, until_s=until_s)


def find_current_start_s(
    windows: Sequence[TrafficWindow], change: TrafficChange | None, settled_s: float
) -> float:
    """Return the time since which windows represent the present traffic.

    The fleet has been stable since `settled_s`. Requests that end just after a change mostly began
    before it, and those that began and ended after it are short. So windows count from the
    detection of the change; earlier ones count only if lengths have not changed and there are too
    few requests since.
    """
    if change is None or change.detected_s <= settled_s:
        return settled_s
    later = join_windows(after) if (after := _list_after(windows, change.detected_s)) else None
    has_enough = later is not None and min(later.prompts.num, later.outputs.num) >= MIN_REQUESTS
    if change.quantity is Quantity.RATE and not has_enough:
        return max(change.since_s, settled_s)
    return change.detected_s


def find_settle_s(
    windows: Sequence[TrafficWindow], change: TrafficChange | None, since_s: float, least_s: float
) -> float:
    """Seconds after `since_s` in which latencies still reflect earlier conditions.

    Requests that end by then began before `since_s`: this covers the life of a request and, as the
    start of a change is not known to the second, the time that its detection took. At least
    `least_s`.
    """
    groups = (windows, _list_after(windows, since_s))
    life_s = max((join_windows(each).lifetime_s for each in groups if each), default=0.0)
    mixed_s = max(change.detected_s - since_s, 0.0) if change else 0.0
    return max(least_s, life_s) + mixed_s


def _list_after(windows: Sequence[TrafficWindow], at_s: float) -> list[TrafficWindow]:
    return [window for window in windows if window.start_s >= at_s]


def _list_alike(windows: Sequence[TrafficWindow]) -> list[TrafficWindow]:
    """The last windows with one threshold for short prompts."""
    newest = reversed(windows)
    alike = takewhile(lambda w: w.whole_below_tokens == windows[-1].whole_below_tokens, newest)
    return [*alike][::-1]


def list_recent(
    windows: Sequence[TrafficWindow], since_s: float, enough_s: float, lead_s: float
) -> tuple[TrafficWindow, ...]:
    """Return the newest windows after `since_s` that last `enough_s` and hold enough requests.
    Windows of `lead_s` before them are included; latencies are compared without these. In all of
    them gateways applied the same threshold for short prompts."""
    after = _list_alike(_list_after(windows, since_s))
    newest = after[::-1]
    lengths = accumulate(window.length_s for window in newest)
    requests = accumulate(min(window.prompts.num, window.outputs.num) for window in newest)
    for window, length_s, num_requests in zip(newest, lengths, requests, strict=True):
        if length_s >= enough_s and num_requests >= MIN_REQUESTS:
            return tuple(each for each in after if each.start_s >= window.start_s - lead_s)
    return tuple(after)
