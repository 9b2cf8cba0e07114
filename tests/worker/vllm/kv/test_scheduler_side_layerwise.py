"""What a step computes of prefills that are followed, from the scheduler's output to the holds."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE = 4
Step = Callable[..., Any]


@pytest.fixture
def running(vllm_outputs: ModuleType) -> Any:
    from cleave_worker.transfer.block_leases import PrefillInProgress
    from cleave_worker.vllm.kv.scheduler_side import InFlightPrefills

    prefills = InFlightPrefills(BLOCK_SIZE)
    prefills.begin("r", PrefillInProgress(1, "d", 3, "name"), 10)
    return prefills


@pytest.fixture
def vllm_outputs() -> ModuleType:
    return pytest.importorskip("vllm.v1.core.sched.output", reason="needs the group worker-cpu")


@pytest.fixture
def step(vllm_outputs: ModuleType) -> Step:
    def output(
        tokens: int,
        *,
        new: tuple[int, ...] = (),
        known: int = 0,
        first: bool = False,
        **fields: Any,
    ) -> Any:
        """So many tokens of "r", with new blocks, after `known` ones."""
        cached = vllm_outputs.CachedRequestData.make_empty()
        started = []
        if first:
            started.append(
                SimpleNamespace(req_id="r", block_ids=(list(new),), num_computed_tokens=known)
            )
        elif tokens:
            cached.req_ids.append("r")
            cached.new_block_ids.append((list(new),) if new else None)
            cached.num_computed_tokens.append(known)
        return SimpleNamespace(
            scheduled_new_reqs=started,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"r": tokens},
            preempted_req_ids=fields.get("preempted", set()),
        )

    return output


def summary(chunk: Any) -> tuple[tuple[int, ...], int, int, bool]:
    return chunk.blocks, chunk.num_final_before, chunk.num_final_after, chunk.is_last


def test_whole_blocks_become_final_step_by_step_and_the_last_one_with_the_prompt(
    running: Any, step: Step
) -> None:
    progress = [
        running.advance(step(6, new=(7, 8), first=True)),
        running.advance(step(1, known=6)),
        running.advance(step(3, new=(9,), known=7)),
        running.advance(step(1, known=10, new=(4,))),
    ]
    assert [(list(chunks), lost) for chunks, lost in progress] == [
        (["r"], set()),
        (["r"], set()),
        (["r"], set()),
        ([], set()),
    ]
    assert [summary(chunks["r"]) for chunks, _ in progress[:3]] == [
        ((7, 8), 0, 1, False),
        ((7, 8), 1, 1, False),
        ((7, 8, 9), 1, 3, True),
    ]


def test_what_the_prefix_cache_had_counts_as_computed_in_the_step_that_finds_it(
    running: Any, step: Step
) -> None:
    chunks, _ = running.advance(step(2, new=(7, 8, 9), known=8, first=True))
    assert summary(chunks["r"]) == ((7, 8, 9), 0, 3, True)


def test_a_preempted_prefill_is_lost_and_never_announced_again(running: Any, step: Step) -> None:
    running.advance(step(4, new=(7,), first=True))
    assert running.advance(step(0, preempted={"r", "other"})) == ({}, {"r"})
    assert running.advance(step(10, new=(1, 2, 3))) == ({}, set())
    assert running.end("r") is None


class RecordedUpdates:
    """Records the updates it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []

    def update_progress(self, request_id: str, blocks: Any, progress: Any, computed: Any) -> None:
        assert computed is None
        self.steps.append((progress.blocks_done, progress.blocks_started, progress.layers_done))


@pytest.mark.parametrize(
    ("granularity", "announced"),
    [
        ("prompt", [(3, 3, 0)]),
        ("chunk", [(1, 1, 0), (3, 3, 0)]),
        ("layer", [(0, 1, 1), (0, 1, 2), (1, 1, 0), (1, 3, 1), (1, 3, 2), (3, 3, 0)]),
    ],
)
def test_layers_chunks_or_the_prompt_are_announced(
    running: Any, step: Step, granularity: str, announced: list[tuple[int, int, int]]
) -> None:
    torch = pytest.importorskip("torch", reason="torch comes with the engine")
    from cleave_worker.vllm.kv.worker_side import LayerNotifier, TransferGranularity

    updates = RecordedUpdates()
    announcer = LayerNotifier(updates, TransferGranularity(granularity), torch.device("cpu"))  # type: ignore[arg-type]
    for output in (step(6, new=(7, 8), first=True), step(4, new=(9,), known=6)):
        announcer.begin_step(running.advance(output)[0])
        for plane in (0, 1, 1):
            announcer.finish_layer(plane)
        announcer.finish_step()
        announcer.finish_step()
    assert updates.steps == announced
