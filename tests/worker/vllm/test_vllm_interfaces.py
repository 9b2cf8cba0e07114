"""The interfaces of vLLM that our scheduler uses are unchanged.

When a test fails here after an upgrade, read what vLLM does now before anything is adapted.
"""

import inspect
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def scheduler() -> ModuleType:
    return pytest.importorskip("vllm.v1.core.sched.scheduler")


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_what_is_overridden_takes_what_it_took(scheduler: ModuleType) -> None:
    ours = scheduler.Scheduler
    assert parameters(ours.schedule) == ["self", "throttle_prefills"]
    assert parameters(ours._free_request) == ["self", "request", "delay_free_blocks"]
    assert parameters(ours.__init__)[:5] == [
        *("self", "vllm_config", "kv_cache_config", "structured_output_manager", "block_size")
    ]


def test_schedulers_that_run_ahead_have_no_schedule_of_their_own(scheduler: ModuleType) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert issubclass(AsyncScheduler, scheduler.Scheduler)
    assert not {"schedule", "_free_request", "_preempt_request"} & vars(AsyncScheduler).keys()


def test_the_queue_of_waiting_requests_has_the_methods_that_ours_has(scheduler: ModuleType) -> None:
    from vllm.v1.core.sched import request_queue

    named = {
        name: parameters(method)
        for name, method in vars(request_queue.RequestQueue).items()
        if getattr(method, "__isabstractmethod__", False)
    }
    assert named == {
        "add_request": ["self", "request"],
        "pop_request": ["self"],
        "peek_request": ["self"],
        "prepend_request": ["self", "request"],
        "prepend_requests": ["self", "requests"],
        "remove_request": ["self", "request"],
        "remove_requests": ["self", "requests"],
        "__bool__": ["self"],
        "__len__": ["self"],
        "__iter__": ["self"],
    }


@pytest.mark.parametrize(
    ("line", "times"),
    [
        # One place checks whether the queue is empty, just before it reads the first request.
        ("request_queue = self.waiting", 1),
        ("if not request_queue or input_budget <= draft_slots:", 1),
        ("request = request_queue.peek_request()", 1),
        # Requests whose KV is on its way hold blocks and wait elsewhere.
        ("request_queue = self.kv_holding_waiting", 1),
        # Limits of the pass.
        ("token_budget = self.max_num_scheduled_tokens", 1),
        ("if num_running >= self.max_num_active_reqs:", 1),
        ("self.scheduler_config.long_prefill_token_threshold", 1),
        # Who is preempted.
        ("preempted_req = self.running[-1]", 1),
        ("preempted_req = self.running.pop()", 1),
    ],
)
def test_vllms_loop_looks_where_it_looked(scheduler: ModuleType, line: str, times: int) -> None:
    assert inspect.getsource(scheduler.Scheduler.schedule).count(line) == times, line


def test_no_other_caller_checks_for_waiting_requests(scheduler: ModuleType) -> None:
    source = inspect.getsource(scheduler)
    for question in ("if self.waiting", "not self.waiting", "bool(self.waiting"):
        assert question not in source
    assert source.count("len(self.waiting)") == 1


def test_a_function_may_make_the_scheduler() -> None:
    core = pytest.importorskip("vllm.v1.engine.core")
    source = inspect.getsource(core.EngineCore.__init__)
    assert "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()" in source
    assert "Scheduler(\n            vllm_config=vllm_config," in source


def test_the_handshake_of_nixl_compares_the_name_of_a_model_and_not_its_revision() -> None:
    """So agents name a folder by its content (`model_link`), and repositories are kept apart by
    routers alone."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata"
    metadata = pytest.importorskip(name)

    def compute(model: str, revision: str = "") -> str:
        sizes = dict.fromkeys(
            ("get_total_num_kv_heads", "get_head_size", "get_total_num_hidden_layers"), lambda: 4
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=model, revision=revision, dtype="float32", **sizes),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
            speculative_config=None,
        )
        return metadata.compute_nixl_compatibility_hash(config, "CPU_ATTN")

    assert compute("/tmp/a1-5f") == compute("/tmp/a1-5f") != compute("/tmp/b2-5f")
    assert compute("org/m", "a" * 40) == compute("org/m", "b" * 40)
