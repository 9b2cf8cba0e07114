"""Cores: what is meant, what is taken, who holds it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave_worker.agent.cpu_cores import (
    CoreLocks,
    CoreRequest,
    CoresError,
    build_omp_binding,
    parse,
    plan_cores,
)

FOUR = frozenset(range(4))
HOLDER = """
import sys, time
from pathlib import Path
from cleave_worker.agent.cpu_cores import CoreLocks, CoreRequest
locks = CoreLocks(Path(sys.argv[1]), "other-pod")
print(locks.acquire(CoreRequest((0,)), False), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another agent that holds core 0."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "(0,)\n"
        yield process
        process.kill()


def test_a_list_of_cores_may_hold_ranges() -> None:
    assert parse("0,2-4,2") == (0, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-2"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(CoresError):
        parse(text)


def test_an_affinity_set_by_a_static_cpu_manager_is_used_whole() -> None:
    assert plan_cores("auto", frozenset({1, 3}), FOUR, True, 1, "w") == CoreRequest((1, 3))


def test_on_a_free_machine_each_rank_gets_one_free_core() -> None:
    assert plan_cores("auto", FOUR, FOUR, True, 2, "w").count == 2


def test_agents_that_do_not_see_each_others_locks_begin_at_different_cores() -> None:
    requests = [plan_cores("auto", FOUR, FOUR, True, 1, f"chat-decode-{n}") for n in range(20)]
    assert {request.cores[0] for request in requests} == FOUR
    assert all(frozenset(request.cores) == FOUR for request in requests)


def test_an_engine_that_needs_no_pinning_gets_none() -> None:
    assert plan_cores("auto", frozenset({1}), FOUR, False, 1, "w") == CoreRequest(())
    assert plan_cores("none", frozenset({1}), FOUR, True, 1, "w") == CoreRequest(())


def test_cores_outside_the_own_affinity_are_refused() -> None:
    with pytest.raises(CoresError, match="core 5"):
        plan_cores("1,5", FOUR, FOUR, True, 1, "w")


def test_ranks_share_the_cores_equally() -> None:
    assert build_omp_binding((0, 1, 2, 3), 2) == "0,1|2,3"
    assert build_omp_binding((2,), 1) == "2"
    with pytest.raises(CoresError):
        build_omp_binding((0,), 2)


def test_an_occupied_core_is_refused_with_holder_and_remedy(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    with pytest.raises(CoresError) as refused:
        CoreLocks(tmp_path, "w").acquire(CoreRequest((0,)), allow_shared=False)
    for part in ("core 0", str(holder.pid), "other-pod", "--cores", "--allow-shared-cores"):
        assert part in str(refused.value)


def test_a_free_core_is_found_beside_an_occupied_one(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    locks = CoreLocks(tmp_path, "w")
    assert locks.acquire(CoreRequest((0, 1), count=1), allow_shared=False) == (1,)
    locks.release()


def test_too_few_free_cores_are_refused_and_nothing_stays_locked(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    with pytest.raises(CoresError, match="2 free"):
        CoreLocks(tmp_path, "w").acquire(CoreRequest((0, 1), count=2), allow_shared=False)
    again = CoreLocks(tmp_path, "w")
    assert again.acquire(CoreRequest((1,)), allow_shared=False) == (1,)
    again.release()


def test_cores_may_be_shared_when_configured(tmp_path: Path, holder: subprocess.Popen) -> None:
    locks = CoreLocks(tmp_path, "w")
    assert locks.acquire(CoreRequest((0,)), allow_shared=True) == (0,)
    assert locks.acquire(CoreRequest((0, 1), count=2), allow_shared=True) == (0, 1)
    locks.release()


def test_the_kernel_frees_the_cores_of_a_killed_holder(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    locks = CoreLocks(tmp_path, "w")
    assert locks.acquire(CoreRequest((0,)), allow_shared=False) == (0,)
    locks.release()
