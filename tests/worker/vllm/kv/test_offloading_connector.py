"""vLLM's OffloadingConnector beside one that writes between steps."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]


def test_copies_of_blocks_that_another_connector_fills_are_awaited() -> None:
    pytest.importorskip("vllm.v1.request", reason="needs the group worker-cpu")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    from cleave_worker.vllm.kv.offloading_connector import OffloadingConnector

    calls: list[int] = []
    allocated: set[int] = {7}
    connector: Any = object.__new__(OffloadingConnector)
    connector.connector_scheduler = SimpleNamespace(
        _current_batch_allocated_block_ids=allocated,
        update_state_after_alloc=lambda request, blocks, count: calls.append(count),
    )
    group = [
        SimpleNamespace(block_id=1, block_hash=b"cached", is_null=False),
        SimpleNamespace(block_id=2, block_hash=None, is_null=False),
        SimpleNamespace(block_id=0, block_hash=None, is_null=True),
    ]
    blocks: Any = SimpleNamespace(blocks=(group,))
    connector.update_state_after_alloc(SimpleNamespace(), blocks, 0)
    assert (allocated, calls) == ({2, 7}, [0])
    # What vLLM waits for before a step.
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.build_connector_meta)
    assert "_current_batch_allocated_block_ids" in source
    assert "jobs_to_flush" in source
