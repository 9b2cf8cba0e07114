"""Whether traffic is still what was planned for, and which windows speak of it now. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cleave.api.workload import Workload
from cleave.traffic.change import Change, Detector, Quantity, Reference, watch
from cleave.traffic.refit import FEWEST
from cleave.traffic.window import Window, join

DOUBT_S = 60.0
_DOUBT = 0.2
"""A look is put off for so long at most, and for this part of the interval between two."""


@dataclass(frozen=True, slots=True)
class Course:
    """How traffic compares with what was planned for, as far as windows were looked at."""

    planned_for: Workload | None = None
    since_s: float | None = None
    """When the fleet settled; None: it has not."""
    until_s: float = 0.0
    """End of the last window that was looked at."""
    detector: Detector = Detector()  # noqa: RUF009 - a frozen value
    change: Change | None = None
    """The last one; None: none was seen."""

    def puts_off(self, late_s: float, interval_s: float) -> bool:
        """Whether a look that has been due for `late_s` had better wait for a change to show."""
        return self.detector.is_in_doubt and late_s < min(DOUBT_S, _DOUBT * interval_s)

    def is_fresh(self, now_s: float, interval_s: float) -> bool:
        """Whether a change was seen less than an interval ago: each minute tells more of it."""
        return self.change is not None and now_s - self.change.at_s < interval_s


def follow(
    course: Course, planned_for: Workload | None, windows: Iterable[Window], since_s: float | None
) -> Course:
    """The course with what is new of `windows`; one of other traffic or an earlier fleet ends.

    Nothing is compared where nothing was planned for, or before the fleet has settled (`since_s`).
    A change after which the plan was kept does not hide the next one.
    """
    if (course.planned_for, course.since_s) != (planned_for, since_s):
        reference = Reference.of(planned_for) if planned_for else None
        course = Course(planned_for, since_s, detector=Detector(reference))
    if course.detector.reference is None and course.until_s == 0.0:
        return course
    if since_s is None:
        return course
    detector, change, until_s = course.detector, course.change, course.until_s
    for window in windows:
        if window.start_s >= since_s and window.end_s > until_s:
            detector, found = watch(detector, window)
            change, until_s = found or change, window.end_s
    return replace(course, detector=detector, change=change, until_s=until_s)


def find_start(windows: Sequence[Window], change: Change | None, settled_s: float) -> float:
    """Since when windows tell of the traffic as it is now; the fleet has settled at `settled_s`.

    What ends just after a change came mostly before it, and what came after it and ends is short.
    So windows count from the moment when the change was seen; those before it only where lengths
    have not changed and too little is known since.
    """
    if change is None or change.at_s <= settled_s:
        return settled_s
    later = join(after) if (after := _list_after(windows, change.at_s)) else None
    is_known = later is not None and min(later.prompts.num, later.outputs.num) >= FEWEST
    if change.what is Quantity.RATE and not is_known:
        return max(change.since_s, settled_s)
    return change.at_s


def find_settle_s(
    windows: Sequence[Window], change: Change | None, since_s: float, least_s: float
) -> float:
    """So long after `since_s` latencies tell also of what was before it; `least_s` at least.

    Who ends by then came before: for the life of a request, and as long as a change took to be
    seen, for when it began is not known to the second.
    """
    looked_at = (windows, _list_after(windows, since_s))
    life_s = max((join(each).life_s for each in looked_at if each), default=0.0)
    mixed_s = max(change.at_s - since_s, 0.0) if change else 0.0
    return max(least_s, life_s) + mixed_s


def _list_after(windows: Sequence[Window], at_s: float) -> list[Window]:
    return [window for window in windows if window.start_s >= at_s]


def list_recent(
    windows: Sequence[Window], since_s: float, enough_s: float, lead_s: float
) -> tuple[Window, ...]:
    """The newest windows after `since_s`, as many as are `enough_s` long and say enough.

    Those of `lead_s` before come with them: whoever judges latencies by them leaves these out.
    """
    after = _list_after(windows, since_s)
    newest = after[::-1]
    lengths = accumulate(window.length_s for window in newest)
    requests = accumulate(min(window.prompts.num, window.outputs.num) for window in newest)
    for window, length_s, known in zip(newest, lengths, requests, strict=True):
        if length_s >= enough_s and known >= FEWEST:
            return tuple(each for each in after if each.start_s >= window.start_s - lead_s)
    return tuple(after)
