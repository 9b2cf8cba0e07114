"""The planner's desk: one question at a time, in a process of its own, with a time limit.

Used by the controller. Planning takes seconds of computing, during which the operator has to renew
its lease and look after everything else; hence the process. `answer` runs there.
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
from cleave.api.observed import PlanBasis
from cleave.controller.actions import PlanOutcome
from cleave.controller.possible import unread

log = logging.getLogger(__name__)

K = TypeVar("K")

LIMIT_S = 600.0
"""How long one plan may take."""
_NICENESS = 10
_STAND_IN = "facebook/opt-13b"
"""What emulated engines take a model for that they do not know."""


def answer(text: str, cluster: Cluster | None, question: PlanOutcome) -> PlanOutcome:
    """What the planner says to a deployment (as JSON); `question` says from what and of what."""
    from cleave.controller.loop import review
    from cleave.controller.loop.basis import to_correction
    from cleave.perf.corrected import correct
    from cleave.planner import asking, checks, emulated, growth, search
    from cleave.planner.placement import Placement, PlanError
    from cleave.planner.words import reason_alone
    from cleave.pods.pool import selected_plan

    deployment = _with_traffic(LLMDeployment.model_validate_json(text), question.basis)
    is_emulated = deployment.spec.engine.type is EngineType.EMULATED
    if faults := tuple(unread(deployment)):
        return question.with_faults(faults)
    if (why := checks.unknown_model(deployment, reads_files=False)) is not None:
        return question.with_faults([f"spec.model.source: {why}"])
    try:
        if is_emulated:
            # They need no GPU, so nodes do not bound their number.
            problem = emulated.problem(_without_folder(deployment))
        elif cluster is None:
            raise PlanError(["no node has GPUs (nvidia.com/gpu, with nvidia.com/gpu.product)"])
        else:
            problem = asking.problem(deployment, cluster)
        if question.review is not None:
            return review.answer(deployment, problem, question, question.review)
        if question.basis is not None:
            correction = to_correction(question.basis.correction)
            problem = replace(problem, estimator=correct(problem.estimator, correction))
        told = search.plan(problem)
    except (PlanError, ManifestError) as error:
        return question.with_faults(error.faults)
    if told.selected is None:
        return question.as_infeasible(reason_alone(told))
    law = growth.told(problem, told.selected) if deployment.spec.scaling.roles else None
    plan = selected_plan(deployment, Placement(told.selected.pools, told.reason, told), law)
    plan = plan.model_copy(update={"inputs": question.inputs})
    return question.with_plan(plan.model_dump(mode="json", exclude_none=True))


def _with_traffic(deployment: LLMDeployment, basis: PlanBasis | None) -> LLMDeployment:
    """The deployment as if it stated the traffic that is planned for."""
    if basis is None:
        return deployment
    spec = deployment.spec.model_copy(update={"workload": basis.workload})
    return deployment.model_copy(update={"spec": spec})


def _without_folder(deployment: LLMDeployment) -> LLMDeployment:
    """The deployment with a model that is known without reading a folder."""
    spec = deployment.spec
    if spec.model.folder is None:
        return deployment
    model = spec.model.model_copy(update={"source": _STAND_IN})
    spec = spec.model_copy(update={"model": model})
    return deployment.model_copy(update={"spec": spec})


class Desk(Generic[K]):
    """Asks the planner and keeps its last answer for each key."""

    def __init__(self, answered: Callable[[K], None], limit_s: float = LIMIT_S) -> None:
        self._answered = answered
        self._limit_s = limit_s
        self._answers: dict[K, PlanOutcome] = {}
        self._asked: dict[K, asyncio.Task[None]] = {}
        self._inputs: dict[K, PlanOutcome] = {}
        self._one, self._one_review = asyncio.Lock(), asyncio.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def last(self, key: K) -> PlanOutcome | None:
        """The last answer for `key`."""
        return self._answers.get(key)

    def asked(self, key: K) -> PlanOutcome | None:
        """The question that is being worked on for `key`."""
        return self._inputs.get(key) if key in self._asked else None

    def ask(
        self, key: K, deployment: LLMDeployment, cluster: Cluster | None, question: PlanOutcome
    ) -> None:
        """Ask, unless this very question is being worked on; an older one of `key` is dropped."""
        if key in self._asked:
            if self._inputs[key] == question:
                return
            self._asked[key].cancel()
        self._inputs[key] = question
        self._asked[key] = asyncio.create_task(self._work(key, deployment, cluster, question))

    def forget(self, key: K) -> None:
        """The deployment is gone."""
        self._answers.pop(key, None)
        self._inputs.pop(key, None)
        if task := self._asked.pop(key, None):
            task.cancel()

    async def close(self) -> None:
        """Stop planning."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        self._stop_process()

    async def _work(
        self, key: K, deployment: LLMDeployment, cluster: Cluster | None, question: PlanOutcome
    ) -> None:
        async with self._turn(question):
            outcome = await self._answer(deployment, cluster, question)
        self._answers[key] = outcome
        if self._asked.get(key) is asyncio.current_task():
            del self._asked[key]
        self._answered(key)

    @asynccontextmanager
    async def _turn(self, question: PlanOutcome) -> AsyncIterator[None]:
        """One at a time; of what runs already, only one waits while others wait for a plan."""
        async with AsyncExitStack() as held:
            if question.review is not None:
                await held.enter_async_context(self._one_review)
            await held.enter_async_context(self._one)
            yield

    async def _answer(
        self, deployment: LLMDeployment, cluster: Cluster | None, question: PlanOutcome
    ) -> PlanOutcome:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=os.nice, initargs=(_NICENESS,)
            )
        text = deployment.model_dump_json(exclude_none=True)
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, answer, text, cluster, question
        )
        try:
            async with asyncio.timeout(self._limit_s):
                return await future
        except TimeoutError:
            self._stop_process()
            return question.with_faults(
                (f"the planner has not answered within {self._limit_s:.0f} s",)
            )
        except BrokenProcessPool:
            self._stop_process()
            return question.with_faults(("the planner has ended; is its memory too little?",))
        except asyncio.CancelledError:
            # Whoever asks next should not wait for an answer that nobody wants.
            self._stop_process()
            raise
        except Exception as error:
            log.exception("planning %s", deployment.name)
            return question.with_faults((f"the planner failed: {type(error).__name__}: {error}",))

    def _stop_process(self) -> None:
        if self._pool is None:
            return
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
