"""What the agent says where RDMA cannot register memory."""

import resource
from pathlib import Path

import pytest

from cleave_worker.agent import memory_lock


@pytest.mark.parametrize(
    ("limit", "is_fault"),
    [(8 * 2**20, True), (2**30, True), (2**41, False), (resource.RLIM_INFINITY, False)],
)
def test_a_low_limit_is_named_with_its_remedy(monkeypatch, tmp_path, limit, is_fault) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    fault = memory_lock.explain_limit(tmp_path)
    assert (fault is not None) is is_fault
    if fault:
        assert f"{limit // 1024} KiB; set LimitMEMLOCK=infinity" in fault


def test_without_rdma_devices_no_memory_is_locked(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, 0))
    assert memory_lock.explain_limit(tmp_path / "infiniband") is None
