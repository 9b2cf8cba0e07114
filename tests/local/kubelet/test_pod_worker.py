import pytest

from cleave.local.kubelet import pod_worker
from cleave.local.kubelet.pod_spec import RestartPolicy


@pytest.mark.parametrize(
    ("policy", "after_success", "after_failure"),
    [
        (RestartPolicy.ALWAYS, True, True),
        (RestartPolicy.ON_FAILURE, False, True),
        (RestartPolicy.NEVER, False, False),
    ],
)
def test_the_policy_says_what_is_started_again(
    policy: RestartPolicy, after_success: bool, after_failure: bool
) -> None:
    assert pod_worker.should_restart(policy, 0) is after_success
    assert pod_worker.should_restart(policy, 1) is after_failure


def test_the_pause_doubles_to_its_bound() -> None:
    assert [pod_worker.compute_backoff_s(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert pod_worker.compute_backoff_s(10_000) == 30


def test_a_container_that_ran_for_long_begins_a_new_count() -> None:
    assert pod_worker.count_failures(5, ran_s=1) == 6
    assert pod_worker.count_failures(5, ran_s=60) == 1
