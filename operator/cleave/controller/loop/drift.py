"""Whether traffic is still what was planned for, and which windows speak of it now. Pure."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from cleave.api.workload import Workload
from cleave.traffic.change import Change, Detector, Reference, watch
from cleave.traffic.refit import FEWEST
from cleave.traffic.window import Window


def find_change(
    planned_for: Workload | None, windows: Iterable[Window], since_s: float | None
) -> Change | None:
    """The last change since the fleet has settled (None there: it has not); None: none was seen.

    Nothing is compared where nothing was planned for. A change after which the plan was kept does
    not hide the next one.
    """
    reference = Reference.of(planned_for) if planned_for else None
    if reference is None or since_s is None:
        return None
    detector, last = Detector(reference), None
    for window in windows:
        if window.start_s >= since_s:
            detector, change = watch(detector, window)
            last = change or last
    return last


def list_recent(
    windows: Sequence[Window], since_s: float, enough_s: float, lead_s: float
) -> tuple[Window, ...]:
    """The newest windows after `since_s`, as many as are `enough_s` long and say enough.

    Those of `lead_s` before come with them: whoever judges latencies by them leaves these out.
    """
    after = [window for window in windows if window.start_s >= since_s]
    newest = after[::-1]
    lengths = accumulate(window.length_s for window in newest)
    requests = accumulate(min(window.prompts.num, window.outputs.num) for window in newest)
    for window, length_s, known in zip(newest, lengths, requests, strict=True):
        if length_s >= enough_s and known >= FEWEST:
            return tuple(each for each in after if each.start_s >= window.start_s - lead_s)
    return tuple(after)
