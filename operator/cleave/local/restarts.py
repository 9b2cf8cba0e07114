"""Restart policy and crash-loop back-off of Kubernetes as pure functions.

Called by the kubelet after each exit. The delays are shorter than those of Kubernetes (10 s to
5 min), because the user works at this machine.
"""

from cleave.local.kubelet.pod_spec import RestartPolicy

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_S = 60.0
"""A container that ran this long resets the count of failures."""


def wanted(policy: RestartPolicy, exit_code: int) -> bool:
    """Whether a container that ended with `exit_code` has to be restarted."""
    if policy is RestartPolicy.ON_FAILURE:
        return exit_code != 0
    return policy is RestartPolicy.ALWAYS


def failures_in_a_row(before: int, ran_s: float) -> int:
    """The number of consecutive failures including this exit, which determines the delay."""
    return 1 if ran_s >= STABLE_S else before + 1


def delay_s(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1."""
    return float(min(FIRST_DELAY_S * 2 ** min(failures - 1, 16), LONGEST_DELAY_S))
