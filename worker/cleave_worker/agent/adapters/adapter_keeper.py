"""Keeps the LoRA adapters of a running engine as they were ordered.

Run by the supervisor beside the health checks, once per boot: so a restarted engine gets what is
ordered now. `cleave.policy.adapters` decides each step; this module carries it out and reports it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cleave.policy.adapters import (
    AdapterSource,
    AdapterState,
    StepKind,
    add_contents,
    choose_next_step,
    compute_retry_delay,
)
from cleave.rpc.http_client import HttpError
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent import engine_api
from cleave_worker.agent.adapters.adapter_contents import AdapterContents
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.launch import can_load_adapters
from cleave_worker.agent.weights.loaded_weights import WeightsError

_log = logging.getLogger(__name__)
_NOT_ENABLED = "the engine was started without --enable-lora: add it to spec.engine.args"


async def keep_loaded(
    config: AgentConfig, instance: WorkerInstance, url: str, headers: dict[str, str]
) -> None:
    """Load and unload adapters in the engine at `url` as they are ordered, until cancelled."""
    if not can_load_adapters(config):
        await _refuse_all(instance)
    keeper = _AdapterKeeper(config, instance, url, headers)
    try:
        while True:
            await keeper.make_step()
    finally:
        # The next boot begins without adapters.
        ordered = add_contents(instance.ordered_adapters, instance.adapter_contents)
        instance.report_adapters(list(build_report(ordered, {})))


async def _refuse_all(instance: WorkerInstance) -> None:
    while True:
        ordered = instance.ordered_adapters
        states = {each.engine_name: AdapterState(each, fault=_NOT_ENABLED) for each in ordered}
        instance.report_adapters(list(build_report(ordered, states)))
        if ordered == instance.ordered_adapters:
            await instance.wait_for_change()


class _AdapterKeeper:
    """The adapters of one boot of the engine."""

    def __init__(
        self, config: AgentConfig, instance: WorkerInstance, url: str, headers: dict[str, str]
    ) -> None:
        self._timing = config.timing
        self._instance = instance
        self._url = url
        self._headers = headers
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._contents = AdapterContents(config, self._clock)
        self._states: dict[str, AdapterState] = {}
        """By engine name."""

    async def make_step(self) -> None:
        """Make the next step, or wait until one is due, and report the result."""
        instance, order = self._instance, self._instance.ordered_adapters
        instance.adapter_contents = await self._contents.find(order)
        ordered = add_contents(order, instance.adapter_contents)
        self._states = _apply_order(ordered, self._states)
        step = choose_next_step(
            ordered,
            self._states,
            self._clock(),
            overlap_s=self._timing.adapter_overlap,
            linger_s=self._timing.adapter_linger,
        )
        instance.report_adapters(list(build_report(ordered, self._states)))
        if step.adapter is None:
            if instance.ordered_adapters == order:
                check_s = self._contents.check_s
                until_check_s = () if check_s is None else (max(check_s - self._clock(), 0.0),)
                waits_s = [each for each in (step.wait_s, *until_check_s) if each is not None]
                await instance.wait_for_change(min(waits_s, default=None))
        elif step.kind is StepKind.LOAD:
            await self._load(step.adapter)
        elif step.kind is StepKind.UNLOAD:
            await self._remove(step.adapter)
        else:
            name = step.adapter.engine_name
            self._states[name] = replace(self._states[name], withdrawn_s=self._clock())

    async def _load(self, adapter: AdapterSource) -> None:
        name, seconds = adapter.engine_name, self._timing.adapter_load
        try:
            path = await self._contents.fetch(adapter)
            fault = await engine_api.load_adapter(self._url, name, path, seconds, self._headers)
            if not fault and await self._contents.has_changed(adapter):
                await engine_api.remove_adapter(self._url, name, seconds, self._headers)
                fault = "its files have changed while it was loaded"
        except (HttpError, WeightsError) as error:
            fault = str(error)
        now = self._clock()
        if not fault:
            _log.info("adapter %s is loaded from %s", name, adapter.source)
            self._states[name] = AdapterState(adapter, loaded_s=now)
            return
        failures = self._states.get(name, AdapterState(adapter)).num_failures + 1
        delay_s = compute_retry_delay(failures)
        fault = fault.replace(name, adapter.name)
        _log.warning("adapter %s is not loaded, again in %.0f s: %s", name, delay_s, fault)
        self._states[name] = AdapterState(
            adapter, num_failures=failures, retry_s=now + delay_s, fault=fault
        )

    async def _remove(self, adapter: AdapterSource) -> None:
        name = adapter.engine_name
        try:
            await engine_api.remove_adapter(
                self._url, name, self._timing.adapter_load, self._headers
            )
        except HttpError as error:
            _log.warning("adapter %s stays in the engine until it is unloaded: %s", name, error)
            self._states[name] = replace(self._states[name], withdrawn_s=self._clock())
        else:
            _log.info("adapter %s is unloaded", name)
            del self._states[name]


def build_report(
    ordered: Sequence[AdapterSource], states: Mapping[str, AdapterState]
) -> Iterator[agent_pb2.RuntimeAdapter]:
    """Yield the ordered adapters, then others that still take requests."""
    for each in ordered:
        state = states.get(each.engine_name, AdapterState(each))
        yield agent_pb2.RuntimeAdapter(
            name=each.name,
            engine_name=each.engine_name,
            loaded=state.loaded_s is not None,
            fault=state.fault,
        )
    names = {each.engine_name for each in ordered}
    for engine_name, state in states.items():
        if engine_name not in names and state.loaded_s is not None and state.withdrawn_s is None:
            yield agent_pb2.RuntimeAdapter(
                name=state.adapter.name, engine_name=engine_name, loaded=True
            )


def _apply_order(
    ordered: Sequence[AdapterSource], states: Mapping[str, AdapterState]
) -> dict[str, AdapterState]:
    """The states after an order: withdrawn adapters that are ordered again take requests, and
    those that were not loaded are forgotten unless they are ordered."""
    names = {each.engine_name for each in ordered}
    return {
        name: replace(state, withdrawn_s=None) if name in names else state
        for name, state in states.items()
        if name in names or state.loaded_s is not None
    }
