"""vLLM's own scheduler, driven without a model, follows terms."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.policy.request_targets import TPOT_KEY, TTFT_KEY
from cleave_worker.scheduling.config import RoleSchedulingConfig
from cleave_worker.scheduling.config_page import ENV, SchedulingPage

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK = 16
MAX_LEN = 512

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    pytest.importorskip("vllm")
    return importlib.import_module("cleave_worker.vllm.scheduler")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, ours: ModuleType) -> Path:
    from cleave.local.tiny_model import build

    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path)
    return path


@pytest.fixture(params=["RoleScheduler", "RoleAsyncScheduler"])
def make(request: pytest.FixtureRequest, model: Path, ours: ModuleType) -> Make:
    """A scheduler of so many blocks, requests and tokens a pass; both of vLLM's classes."""

    def make_one(num_blocks: int = 100, seqs: int = 8, tokens: int = 64, **more: Any) -> Any:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=MAX_LEN),
            scheduler_config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=tokens,
                max_model_len=MAX_LEN,
                is_encoder_decoder=False,
                **more,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        )
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return getattr(ours, request.param)(
            config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )

    return make_one


def add(
    scheduler: Any,
    name: str,
    prompt_len: int,
    max_tokens: int = 4,
    arrival_time: float | None = None,
    **targets: float,
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=targets)
    arrival_time = len(scheduler.requests) if arrival_time is None else arrival_time
    one = Request(name, [1] * prompt_len, params, None, arrival_time=arrival_time)
    scheduler.add_request(one)
    return one


def step(scheduler: Any, take: Callable[[], None] = lambda: None) -> dict[str, int]:
    """One pass with its output, which `take`s its time; tokens by request."""
    from vllm.v1.outputs import ModelRunnerOutput

    output = scheduler.schedule()
    take()
    counts: dict[str, int] = dict(output.num_scheduled_tokens)
    names = list(counts)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    runner_output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
    scheduler.update_from_output(output, runner_output)
    return counts


class Clock:
    """Seconds that pass when a test says so."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("time", "monotonic"):
        monkeypatch.setattr(ours.time, name, clock)
    return clock


def run(scheduler: Any) -> list[str]:
    """Everything to its end; who started, in order."""
    started: list[str] = []
    for _ in range(2_000):
        if not scheduler.has_requests():
            return started
        started += [name for name in step(scheduler) if name not in started]
    pytest.fail("the scheduler does not come to an end")


@pytest.mark.parametrize(
    ("order", "names"),
    [(PrefillOrder.FCFS, "abcde"), (PrefillOrder.SJF, "bcaed"), (PrefillOrder.LJF, "acbde")],
)
def test_prompts_start_in_the_order_of_the_terms_a_batch_at_a_time(
    make: Make, order: PrefillOrder, names: str
) -> None:
    scheduler = make(seqs=1)
    scheduler.apply_scheduling(RoleSchedulingConfig(order, prefill_sched_batch=3))
    for name, length in zip("abcde", (50, 10, 30, 20, 15), strict=True):
        add(scheduler, name, length)
    assert "".join(run(scheduler)) == names


def test_prompts_that_come_while_no_seat_is_free_are_sorted_together(make: Make) -> None:
    scheduler = make(seqs=1)
    scheduler.apply_scheduling(RoleSchedulingConfig(PrefillOrder.SJF))
    add(scheduler, "first", 20, max_tokens=20)
    for name, length in zip("abc", (50, 10, 30), strict=True):
        step(scheduler)
        add(scheduler, name, length)
    assert run(scheduler) == ["first", "b", "c", "a"]


def test_a_pass_keeps_to_the_terms_but_never_above_what_the_engine_was_started_with(
    make: Make,
) -> None:
    scheduler = make()
    for name in "abcdefghijkl":
        add(scheduler, name, 20)
    scheduler.apply_scheduling(RoleSchedulingConfig(max_num_batched_tokens=40, max_num_seqs=2))
    assert step(scheduler) == {"a": 20, "b": 20}
    scheduler.apply_scheduling(
        RoleSchedulingConfig(max_num_batched_tokens=10_000, max_num_seqs=10_000)
    )
    assert sum(step(scheduler).values()) == 64
    run(scheduler)


def test_a_long_prompt_leaves_room_for_those_who_wait(make: Make) -> None:
    scheduler = make()
    scheduler.apply_scheduling(RoleSchedulingConfig(long_prefill_token_threshold=16))
    add(scheduler, "a", 200)
    assert step(scheduler) == {"a": 64}
    add(scheduler, "b", 30)
    assert step(scheduler) == {"a": 16, "b": 16}
    scheduler.apply_scheduling(RoleSchedulingConfig())
    assert step(scheduler) == {"a": 64}
    run(scheduler)


def test_reserving_admission_prevents_preemption(make: Make) -> None:
    preemptions = {}
    for admission in (Admission.GREEDY, Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC):
        # 12 blocks of 16; each request holds 48 at its end.
        scheduler = make(num_blocks=13)
        scheduler.apply_scheduling(RoleSchedulingConfig(admission=admission))
        sent = []
        for name in "abcdefgh":
            sent.append(add(scheduler, name, 8, max_tokens=40))
            step(scheduler)
        run(scheduler)
        preemptions[admission] = sum(one.num_preemptions for one in sent)
    assert preemptions[Admission.GREEDY] > preemptions[Admission.RESERVE_DYNAMIC] == 0


def test_answers_that_end_early_are_learnt_from(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    # With a limit of 400, they end after two tokens.
    scheduler = make(num_blocks=41)
    scheduler.apply_scheduling(RoleSchedulingConfig(admission=Admission.RESERVE_STATIC))
    for turn in range(40):
        add(scheduler, str(turn), 100, max_tokens=400)
        step(scheduler)
        step(scheduler)
        scheduler.requests[str(turn)].status = RequestStatus.FINISHED_STOPPED
        scheduler.running.clear()
        scheduler._free_request(scheduler.requests[str(turn)])
    for name in "abcd":
        add(scheduler, name, 100, max_tokens=400)
    scheduler.schedule()
    scheduler.schedule()
    assert len(scheduler.running) > 1


def test_who_was_preempted_often_is_spared(make: Make) -> None:
    def preempted(limit: int) -> list[int]:
        scheduler = make(num_blocks=40)
        scheduler.apply_scheduling(RoleSchedulingConfig(preemption_limit=limit))
        named = enumerate("abcd")
        sent = [add(scheduler, name, 8, max_tokens=200 + 30 * n) for n, name in named]
        run(scheduler)
        return [one.num_preemptions for one in sent]

    assert preempted(0) == [0, 0, 0, 2]
    assert preempted(1) == [0, 0, 1, 1]


def test_requests_that_leave_the_queue_leave_it_in_order(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make(seqs=1)
    scheduler.apply_scheduling(RoleSchedulingConfig(PrefillOrder.SJF, prefill_sched_batch=3))
    for name, length in zip("abcde", (50, 10, 30, 20, 15), strict=True):
        add(scheduler, name, length)
    step(scheduler)
    scheduler.finish_requests(["c", "e"], RequestStatus.FINISHED_ABORTED)
    assert run(scheduler) == ["b", "a", "d"]


def test_requests_that_miss_their_target_wait_behind_those_that_meet_it(
    make: Make, clock: Clock
) -> None:
    scheduler = make(seqs=1)
    scheduler.apply_scheduling(RoleSchedulingConfig(PrefillOrder.IN_TIME))
    targets = {TTFT_KEY: 1_000, TPOT_KEY: 50}
    add(scheduler, "first", 20, max_tokens=20, arrival_time=clock.now, **targets)
    step(scheduler)
    for name in ("late", "later"):
        add(scheduler, name, 20, arrival_time=clock.now, **targets)
    clock.now += 2.0
    add(scheduler, "fresh", 20, arrival_time=clock.now, **targets)
    add(scheduler, "without", 20, arrival_time=0.0)
    assert run(scheduler) == ["first", "fresh", "without", "late", "later"]


def test_requests_join_only_if_iterations_stay_within_their_tpot(make: Make, clock: Clock) -> None:
    scheduler = make(num_blocks=200, tokens=512)
    scheduler.apply_scheduling(RoleSchedulingConfig(admission=Admission.WITHIN_TPOT))

    def take() -> None:
        # 1 ms per block of 16 tokens that is in use.
        pool = scheduler.kv_cache_manager.block_pool
        clock.now += (pool.num_gpu_blocks - pool.get_num_free_blocks()) / 1000

    add(scheduler, "first", 16, max_tokens=480, **{TTFT_KEY: 1_000, TPOT_KEY: 40})
    for _ in range(300):
        step(scheduler, take)
    # 20 blocks are in use; prompts would take as long as requests have saved by now.
    add(scheduler, "small", 64, arrival_time=clock.now, **{TTFT_KEY: 1_000, TPOT_KEY: 40})
    add(scheduler, "large", 256, arrival_time=clock.now, **{TTFT_KEY: 1_000, TPOT_KEY: 40})
    assert set(step(scheduler, take)) == {"first", "small"}
    assert "large" in run(scheduler)


def test_an_engine_is_not_idle_while_kv_is_on_its_way(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make()
    assert scheduler._is_idle()
    one = add(scheduler, "a", 16)
    assert scheduler._is_idle(), "it waits"
    one.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not scheduler._is_idle()


def test_what_is_computed_again_counts_as_a_prompt(make: Make) -> None:
    scheduler = make(num_blocks=13, tokens=512)
    scheduler.apply_scheduling(RoleSchedulingConfig(PrefillOrder.IN_TIME))
    counted = []
    count_prompts = scheduler._count_prompts
    scheduler._count_prompts = lambda output: counted.append(count_prompts(output)) or counted[-1]
    sent = [add(scheduler, name, 8, max_tokens=100) for name in "abc"]
    run(scheduler)
    assert sum(one.num_preemptions for one in sent) > 0
    assert next(count for count in counted if count) == 24
    assert max(counted) > 24, "with the tokens that it had generated"


def test_an_engine_without_work_admits_above_the_target(make: Make, clock: Clock) -> None:
    scheduler = make()
    scheduler.apply_scheduling(RoleSchedulingConfig(admission=Admission.WITHIN_TPOT))

    def take() -> None:
        clock.now += 0.04

    for name in "abc":
        add(scheduler, name, 16, max_tokens=50, **{TTFT_KEY: 1, TPOT_KEY: 1})
    for _ in range(200):
        if scheduler.has_requests():
            step(scheduler, take)
    assert not scheduler.has_requests()
    assert not scheduler._first_tokens


def test_the_page_is_looked_at_before_each_pass(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tmp_path / "scheduling"))
    with SchedulingPage(tmp_path / "scheduling") as agent:
        agent.write(RoleSchedulingConfig(max_num_batched_tokens=8))
        scheduler = make()
        add(scheduler, "a", 60)
        assert step(scheduler) == {"a": 8}
        agent.write(RoleSchedulingConfig())
        assert step(scheduler) == {"a": 52}


def test_priorities_of_vllms_own_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        make(policy="priority")
