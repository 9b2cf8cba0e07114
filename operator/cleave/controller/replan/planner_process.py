"""Client of the planner: runs one plan at a time in a process of its own, with a time limit.

Used by the controller. Planning computes for seconds, during which the operator has to renew its
lease and to reconcile other objects; hence the process. `answer` runs there.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import Generic, TypeVar

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.manifest import ManifestError
from cleave.api.replan_status import PlanBasis
from cleave.controller.cluster.actions import PlanOutcome
from cleave.controller.webhook.validation import unread

log = logging.getLogger(__name__)

K = TypeVar("K")

LIMIT_S = 600.0
"""Time limit of one planner run."""
_NICENESS = 10
_STAND_IN = "facebook/opt-13b"
"""Stands in for a model in a folder when engines are emulated."""


def answer(text: str, cluster: Cluster | None, job: PlanOutcome) -> PlanOutcome:
    """Run the planner for a deployment (as JSON) and return `job` with its result.

    Runs in the planner's process; imports are local, as only that process needs these modules.
    """
    from cleave.controller.replan import review
    from cleave.controller.replan.inputs import to_correction
    from cleave.manifests.pool import selected_plan
    from cleave.perf.latency_correction import correct
    from cleave.planner import (
        deployment_checks,
        plan_search,
        problem_from_cluster,
        problem_from_profile,
    )
    from cleave.planner.placement import Placement, PlanError
    from cleave.planner.result.text import reason_alone
    from cleave.planner.scaling_law import growth

    deployment = _with_traffic(LLMDeployment.model_validate_json(text), job.basis)
    is_emulated = deployment.spec.engine.type is EngineType.EMULATED
    if faults := tuple(unread(deployment)):
        return job.with_faults(faults)
    if (reason := deployment_checks.unknown_model(deployment, reads_files=False)) is not None:
        return job.with_faults([f"spec.model.source: {reason}"])
    try:
        if is_emulated:
            # Emulated engines need no GPU, so nodes do not bound their number.
            problem = problem_from_profile.problem(_without_folder(deployment))
        elif cluster is None:
            raise PlanError(["no node has GPUs (nvidia.com/gpu, with nvidia.com/gpu.product)"])
        else:
            problem = problem_from_cluster.problem(deployment, cluster)
        if job.review is not None:
            return review.answer(deployment, problem, job, job.review)
        if job.basis is not None:
            correction = to_correction(job.basis.correction)
            problem = replace(problem, estimator=correct(problem.estimator, correction))
        result = plan_search.plan(problem)
    except (PlanError, ManifestError) as error:
        return job.with_faults(error.faults)
    if result.selected is None:
        return job.as_infeasible(reason_alone(result))
    scaling_law = growth.told(problem, result.selected) if deployment.spec.scaling.roles else None
    plan = selected_plan(
        deployment, Placement(result.selected.pools, result.reason, result), scaling_law
    )
    plan = plan.model_copy(update={"inputs": job.inputs})
    return job.with_plan(plan.model_dump(mode="json", exclude_none=True))


def _with_traffic(deployment: LLMDeployment, fitted: PlanBasis | None) -> LLMDeployment:
    """Return the deployment with the traffic of `fitted` instead of its own."""
    if fitted is None:
        return deployment
    spec = deployment.spec.model_copy(update={"workload": fitted.workload})
    return deployment.model_copy(update={"spec": spec})


def _without_folder(deployment: LLMDeployment) -> LLMDeployment:
    """Return the deployment with a model whose dimensions are known without files."""
    spec = deployment.spec
    if spec.model.folder is None:
        return deployment
    model = spec.model.model_copy(update={"source": _STAND_IN})
    spec = spec.model_copy(update={"model": model})
    return deployment.model_copy(update={"spec": spec})


class Desk(Generic[K]):
    """Submits requests to the planner's process and keeps the last result for each key."""

    def __init__(self, answered: Callable[[K], None], limit_s: float = LIMIT_S) -> None:
        self._answered = answered
        self._limit_s = limit_s
        self._answers: dict[K, PlanOutcome] = {}
        self._asked: dict[K, asyncio.Task[None]] = {}
        self._inputs: dict[K, PlanOutcome] = {}
        self._one, self._one_review = asyncio.Lock(), asyncio.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def last(self, key: K) -> PlanOutcome | None:
        """Return the last result for `key`."""
        return self._answers.get(key)

    def asked(self, key: K) -> PlanOutcome | None:
        """Return the request for `key` that is queued or running."""
        return self._inputs.get(key) if key in self._asked else None

    def ask(
        self, key: K, deployment: LLMDeployment, cluster: Cluster | None, job: PlanOutcome
    ) -> None:
        """Submit a request, unless the same one is running; an older one of `key` is cancelled."""
        if key in self._asked:
            if self._inputs[key] == job:
                return
            self._asked[key].cancel()
        self._inputs[key] = job
        self._asked[key] = asyncio.create_task(self._work(key, deployment, cluster, job))

    def forget(self, key: K) -> None:
        """Cancel the request and drop the result of a deployment that is gone."""
        self._answers.pop(key, None)
        self._inputs.pop(key, None)
        if task := self._asked.pop(key, None):
            task.cancel()

    async def close(self) -> None:
        """Cancel all requests and end the process."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        self._stop_process()

    async def _work(
        self, key: K, deployment: LLMDeployment, cluster: Cluster | None, job: PlanOutcome
    ) -> None:
        async with self._turn(job):
            outcome = await self._answer(deployment, cluster, job)
        self._answers[key] = outcome
        if self._asked.get(key) is asyncio.current_task():
            del self._asked[key]
        self._answered(key)

    @asynccontextmanager
    async def _turn(self, job: PlanOutcome) -> AsyncIterator[None]:
        """Wait for the process.

        Reviews of running plans take one place in the queue at most, so that first plans come soon.
        """
        async with AsyncExitStack() as stack:
            if job.review is not None:
                await stack.enter_async_context(self._one_review)
            await stack.enter_async_context(self._one)
            yield

    async def _answer(
        self, deployment: LLMDeployment, cluster: Cluster | None, job: PlanOutcome
    ) -> PlanOutcome:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=os.nice, initargs=(_NICENESS,)
            )
        text = deployment.model_dump_json(exclude_none=True)
        future = asyncio.get_running_loop().run_in_executor(self._pool, answer, text, cluster, job)
        try:
            async with asyncio.timeout(self._limit_s):
                return await future
        except TimeoutError:
            self._stop_process()
            return job.with_faults((f"the planner has not finished within {self._limit_s:.0f} s",))
        except BrokenProcessPool:
            self._stop_process()
            return job.with_faults(("the planner process has ended; is its memory limit too low?",))
        except asyncio.CancelledError:
            # The next request should not wait for a result that is not needed any more.
            self._stop_process()
            raise
        except Exception as error:
            log.exception("planning %s", deployment.name)
            return job.with_faults((f"the planner failed: {type(error).__name__}: {error}",))

    def _stop_process(self) -> None:
        if self._pool is None:
            return
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
