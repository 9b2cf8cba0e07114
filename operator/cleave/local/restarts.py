"""Restart policy and crash-loop back-off of Kubernetes as pure functions.

Called by the kubelet after each exit. The delays are shorter than those of Kubernetes (10 s to
5 min), because the user works at this machine.
"""

from cleave.local.kubelet.pod_spec import RestartPolicy

INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
BACKOFF_RESET_S = 60.0
"""A container that ran this long resets the count of failures."""


def should_restart(policy: RestartPolicy, exit_code: int) -> bool:
    """Whether a container that ended with `exit_code` has to be restarted."""
    if policy is RestartPolicy.ON_FAILURE:
        return exit_code != 0
    return policy is RestartPolicy.ALWAYS


def count_failures(before: int, ran_s: float) -> int:
    """The number of consecutive failures including this exit, which determines the delay."""
    return 1 if ran_s >= BACKOFF_RESET_S else before + 1


def compute_backoff_s(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1."""
    return float(min(INITIAL_BACKOFF_S * 2 ** min(failures - 1, 16), MAX_BACKOFF_S))
