"""Client of the planner: runs one plan at a time in a separate process, with limits.

Used by the controller. Planning computes for seconds, during which the operator has to renew its
lease and to reconcile other objects; hence the process. `run_planner` runs there. Anybody who may
create a deployment may ask for a plan, so the process has limits of time and memory, and the
namespaces take turns.
"""

import asyncio
import importlib
import logging
import os
import resource
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.manifest import ManifestError
from cleave.api.planning import MAX_GPUS
from cleave.api.replan_status import FittedPlanInputs
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.inventory import PlanMachines
from cleave.controller.replan.fair_lock import FairLock
from cleave.controller.webhook.validation import list_unreadable_files

if TYPE_CHECKING:
    from cleave.planner.problem import Problem

log = logging.getLogger(__name__)

K = TypeVar("K")

TIMEOUT_S = 600.0
"""Time limit of one planner run."""
CONTENDED_TIMEOUT_S = 120.0
"""How long another namespace waits for a plan until the running one is put off, once."""
MEMORY_BYTES = 512 << 20
"""What the process may allocate after its imports: five times a plan for 2,000 GPUs. The pod's own
limit would end the operator as well."""
_CHECK_S = 1.0
_NICENESS = 5
"""It yields to the operator's own loop. At 10, a busy node left it so little that a plan of one
second of CPU was not done after four minutes."""
_STAND_IN_MODEL = "facebook/opt-13b"
"""Replaces a model in a folder when engines are emulated."""


def run_planner(text: str, machines: PlanMachines, job: PlanJob) -> PlanJob:
    """Run the planner for a deployment (as JSON) and return `job` with its result. Runs in the
    planner's process; imports are local, as only that process needs these modules."""
    from cleave.controller.replan import review
    from cleave.manifests.pool import build_selected_plan
    from cleave.planner import plan_search
    from cleave.planner.placement import Placement, PlanError
    from cleave.planner.resolved_deployment import resolve_in_cluster
    from cleave.planner.result.text import strip_verdict
    from cleave.planner.scaling_law import growth

    deployment = _with_traffic(LLMDeployment.model_validate_json(text), job.fitted_inputs)
    is_emulated = deployment.spec.engine.type is EngineType.EMULATED
    if faults := tuple(list_unreadable_files(deployment)):
        return replace(job, faults=faults)
    resolved = resolve_in_cluster(deployment)
    if resolved.unknown_model is not None:
        field = deployment.spec.model.shape_field
        return replace(job, faults=(f"{field}: {resolved.unknown_model}",))
    kept = None
    try:
        if job.review is not None:
            # With others a new plan would replace every instance.
            deployment = resolved.with_max_model_len(job.review.max_model_len).written
            problem = _build_problem(deployment, machines, job, keeps_limit=True)
            return review.run_review(deployment, problem, job, job.review)
        if job.is_replan:
            same = resolved.with_max_model_len(job.max_model_len).written
            with suppress(PlanError):
                problem = _build_problem(same, machines, job, keeps_limit=True)
                kept = plan_search.plan(problem)
        result = kept
        if result is None or result.selected is None:
            problem = _build_problem(deployment, machines, job)
            result = plan_search.plan(problem)
    except (PlanError, ManifestError) as error:
        return replace(job, faults=error.faults)
    if result.selected is None:
        taken = "" if is_emulated else machines.taken
        return replace(job, infeasible="; ".join(filter(None, (strip_verdict(result), taken))))
    roles, selected = deployment.spec.scaling.roles, result.selected
    max_model_len = job.max_model_len if result is kept else selected.max_model_len
    scaling_law = growth.to_plan_growth(problem, selected) if roles else None
    placement = Placement(selected.pools, result.reason, result, max_model_len)
    plan = build_selected_plan(resolved, placement, scaling_law)
    plan = plan.model_copy(update={"inputs": job.inputs_hash})
    return replace(job, plan=plan.model_dump(mode="json", exclude_none=True))


def _build_problem(
    deployment: LLMDeployment, machines: PlanMachines, job: PlanJob, *, keeps_limit: bool = False
) -> "Problem":
    """Build the problem of `job`, with its correction of the latency model unless that is under
    review; `keeps_limit`: no plan may shorten the longest request. Raises PlanError."""
    from cleave.controller.replan.inputs import to_correction
    from cleave.perf.latency_correction import apply_correction
    from cleave.planner import problem_from_cluster, problem_from_profile
    from cleave.planner.placement import PlanError

    if deployment.spec.engine.type is EngineType.EMULATED:
        # Emulated engines need no GPU, so nodes do not bound their number.
        problem = problem_from_profile.build_problem(_without_folder(deployment))
    elif machines.cluster is None:
        raise PlanError(
            [machines.taken or "no node has GPUs (nvidia.com/gpu, with nvidia.com/gpu.product)"]
        )
    else:
        problem = problem_from_cluster.build_problem(
            _with_max_gpus(deployment, machines.max_gpus),
            machines.cluster,
            keeps_limit=keeps_limit,
        )
    if job.review is not None or job.fitted_inputs is None:
        return problem
    correction = to_correction(job.fitted_inputs.correction)
    return replace(problem, estimator=apply_correction(problem.estimator, correction))


def prepare_process(memory_bytes: int) -> None:
    """Bound this process, which will run `run_planner`. Memory beyond the bound is a MemoryError
    or the end of the process."""
    os.nice(_NICENESS)
    # The bound counts from here, as imports take more on machines with more cores.
    importlib.import_module("cleave.planner.plan_search")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(fields["VmData"].split()[0]) * 1024 + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _with_traffic(deployment: LLMDeployment, fitted: FittedPlanInputs | None) -> LLMDeployment:
    """Return the deployment with the traffic of `fitted` instead of the spec's."""
    if fitted is None:
        return deployment
    spec = deployment.spec.model_copy(update={"workload": fitted.workload})
    return deployment.model_copy(update={"spec": spec})


def _with_max_gpus(deployment: LLMDeployment, max_gpus: int | None) -> LLMDeployment:
    """Return the deployment with at most this many GPUs; None: as many as it may have."""
    planning = deployment.spec.planning
    if max_gpus is None or max_gpus >= (planning.max_gpus or MAX_GPUS):
        return deployment
    planning = planning.model_copy(update={"max_gpus": max_gpus})
    spec = deployment.spec.model_copy(update={"planning": planning})
    return deployment.model_copy(update={"spec": spec})


def _without_folder(deployment: LLMDeployment) -> LLMDeployment:
    """Return the deployment with a model whose dimensions are known without files."""
    spec = deployment.spec
    if spec.model.folder is None:
        return deployment
    model = spec.model.model_copy(update={"source": _STAND_IN_MODEL})
    spec = spec.model_copy(update={"model": model})
    return deployment.model_copy(update={"spec": spec})


class PlanPutOffError(Exception):
    """Another namespace has waited long enough; the request runs again, with the whole limit."""


class PlannerClient(Generic[K]):
    """Submits requests to the planner's process and keeps the last result for each key."""

    def __init__(
        self,
        on_finished: Callable[[K], None],
        get_group: Callable[[K], str],
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`get_group`: the namespace of a key; namespaces take turns."""
        self._on_finished = on_finished
        self._get_group = get_group
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._results: dict[K, PlanJob] = {}
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self._submitted: dict[K, PlanJob] = {}
        self._process_lock, self._review_lock = FairLock(), FairLock()
        self._process_pool: ProcessPoolExecutor | None = None

    def get_result(self, key: K) -> PlanJob | None:
        """Return the last result for `key`."""
        return self._results.get(key)

    def get_pending(self, key: K) -> PlanJob | None:
        """Return the request for `key` that is queued or running."""
        return self._submitted.get(key) if key in self._tasks else None

    def submit(
        self,
        key: K,
        deployment: LLMDeployment,
        find_machines: Callable[[], PlanMachines],
        job: PlanJob,
    ) -> None:
        """Submit a request, unless the same one is running; an older one of `key` is cancelled.
        `find_machines` is called when its turn has come, after all results before it have been
        reported. So a request that waits or runs counts machines that have changed as well."""
        if key in self._tasks:
            before = self._submitted[key]
            if replace(before, node_counts_hash=job.node_counts_hash) == job:
                return
            self._tasks[key].cancel()
        self._submitted[key] = job
        self._tasks[key] = asyncio.create_task(self._run_job(key, deployment, find_machines, job))

    def forget(self, key: K) -> None:
        """Cancel the request and drop the result of a deleted deployment."""
        self._results.pop(key, None)
        self._submitted.pop(key, None)
        if task := self._tasks.pop(key, None):
            task.cancel()

    async def close(self) -> None:
        """Cancel all requests and end the process."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._stop_process()

    async def _run_job(
        self,
        key: K,
        deployment: LLMDeployment,
        find_machines: Callable[[], PlanMachines],
        job: PlanJob,
    ) -> None:
        group = self._get_group(key)
        try:
            try:
                async with self._acquire_process(job, group):
                    await self._plan(key, deployment, find_machines(), job, group)
            except PlanPutOffError:
                async with self._acquire_process(job, group):
                    await self._plan(key, deployment, find_machines(), job, None)
        finally:
            self._forget_task(key)

    async def _plan(
        self,
        key: K,
        deployment: LLMDeployment,
        machines: PlanMachines,
        job: PlanJob,
        group: str | None,
    ) -> None:
        """Plan and report the result, while nothing else is planned. Raises PlanPutOffError; not
        if `group` is None."""
        job = replace(job, node_counts_hash=machines.counts_hash)
        self._results[key] = await self._run_in_process(deployment, machines, job, group)
        self._forget_task(key)
        self._on_finished(key)

    def _forget_task(self, key: K) -> None:
        if self._tasks.get(key) is asyncio.current_task():
            del self._tasks[key]

    @asynccontextmanager
    async def _acquire_process(self, job: PlanJob, group: str) -> AsyncIterator[None]:
        """Wait for the process; reviews take one place in the queue, so first plans come soon."""
        async with AsyncExitStack() as stack:
            if job.review is not None:
                await stack.enter_async_context(self._review_lock.acquire(group))
            await stack.enter_async_context(self._process_lock.acquire(group))
            yield

    async def _run_in_process(
        self, deployment: LLMDeployment, machines: PlanMachines, job: PlanJob, group: str | None
    ) -> PlanJob:
        """Raises PlanPutOffError; not if `group` is None."""
        if self._process_pool is None:
            self._process_pool = ProcessPoolExecutor(
                1,
                mp_context=get_context("spawn"),
                initializer=prepare_process,
                initargs=(self._memory_bytes,),
            )
        loop = asyncio.get_running_loop()
        try:
            text = deployment.model_dump_json(exclude_none=True)
            future = loop.run_in_executor(self._process_pool, run_planner, text, machines, job)
            return await self._wait_for_result(future, group)
        except TimeoutError as error:
            self._stop_process()
            fault = str(error)
        except (MemoryError, BrokenProcessPool):
            self._stop_process()
            fault = (
                f"the planner process has ended: it may allocate {self._memory_bytes >> 20} MiB; "
                "a smaller spec.planning.maxGPUs needs less"
            )
        except (asyncio.CancelledError, PlanPutOffError):
            # The next request should not wait for a result that is no longer needed.
            self._stop_process()
            raise
        except Exception as error:
            log.exception("planning %s", deployment.name)
            fault = f"the planner failed: {type(error).__name__}: {error}"
        return replace(job, faults=(fault,))

    async def _wait_for_result(self, future: asyncio.Future[PlanJob], group: str | None) -> PlanJob:
        """Raises TimeoutError when the limit has passed, and PlanPutOffError when another group
        than `group` has waited too long; never if that is None."""
        get_time = asyncio.get_running_loop().time
        started_s = uncontended_s = get_time()
        while not (await asyncio.wait([future], timeout=min(_CHECK_S, self._timeout_s)))[0]:
            now_s = get_time()
            if now_s - started_s > self._timeout_s:
                raise TimeoutError(f"the planner has not finished within {self._timeout_s:.0f} s")
            if group is None or not self._process_lock.has_other_waiters(group):
                uncontended_s = now_s
            elif now_s - uncontended_s > CONTENDED_TIMEOUT_S:
                raise PlanPutOffError
        return future.result()

    def _stop_process(self) -> None:
        if self._process_pool is None:
            return
        for process in list(self._process_pool._processes.values()):
            process.kill()
        self._process_pool.shutdown(wait=False, cancel_futures=True)
        self._process_pool = None
