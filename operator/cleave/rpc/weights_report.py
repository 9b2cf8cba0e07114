"""What instances have loaded, compared: for the operator's conditions, `cleave status` and `top`.

Pure. The same content has the same digest everywhere (`cleave_worker.agent.weights`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What one instance has loaded."""

    instance: str
    weights: str
    """Digest; of a pod whose engines differ the oldest and the newest, with a dot between. Empty:
    nothing."""
    read_s: float
    """When it was read last, in seconds since 1970."""
    fault: str = ""
    """Why other weights could have the same digest; empty: they could not."""

    @property
    def is_known(self) -> bool:
        """Whether the digest stands for these weights alone."""
        return bool(self.weights) and not self.fault

    @property
    def newest(self) -> str:
        """What its last engine has loaded."""
        return self.weights.rpartition(".")[2]


def merge_weights(engines: Iterable[tuple[float, str]]) -> str:
    """Return the weights of a pod with several engines, given when each has read which ones."""
    by_time = [weights for _, weights in sorted(engines)]
    newest = by_time[-1]
    others = [weights for weights in by_time if weights != newest]
    return f"{others[0]}.{newest}" if others else newest


def find_latest(reports: Iterable[WeightsReport]) -> WeightsReport | None:
    """Return the instance that has read its weights last; None: no weights are known."""
    known = (each for each in reports if each.is_known)
    return max(known, key=lambda each: (each.read_s, each.newest), default=None)


def describe_difference(reports: Sequence[WeightsReport], newest: str, read_s: float) -> str:
    """Return which instances have loaded other weights than these, one sentence without a full
    stop; empty: none."""
    known = [each for each in reports if each.is_known]
    others = [f"{each.instance} ({each.weights})" for each in known if each.weights != newest]
    if not others:
        return ""
    names = ", ".join(others[:_MAX_NAMES])
    more = f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
    at = datetime.fromtimestamp(int(read_s), UTC).isoformat().replace("+00:00", "Z")
    return (
        f"{len(others)} of {len(known)} instances have loaded other weights than {newest}, which "
        f"were read last, at {at}, and exchange no KV with the others: {names}{more}"
    )


def describe_fault(reports: Sequence[WeightsReport]) -> str:
    """Return why it is not known whether instances have loaded the same weights, one sentence
    without a full stop; empty: it is known."""
    fault = next((each.fault for each in reports if each.fault), "")
    return f"whether instances have loaded the same weights is not known: {fault}" if fault else ""


def explain_weights(reports: Sequence[WeightsReport]) -> str:
    """Return what is to be said of the weights of running instances; empty: nothing."""
    latest = find_latest(reports)
    difference = describe_difference(reports, latest.newest, latest.read_s) if latest else ""
    return difference or describe_fault(reports)
