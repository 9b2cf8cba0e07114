"""What the agent says about its engine: the one state that everything else reads.

The supervisor, the KV test and the drain write it; the gRPC service and the health probe follow
it. What is hard: followers must see every change at once without polling, so each change replaces
an event that they wait on.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum

from cleave.metrics.load_page import Load, LoadPage
from cleave.rpc import epochs
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.launch import max_adapters
from cleave_worker.scheduling import terms
from cleave_worker.scheduling.terms_page import TermsPage


class RoleRefused(RuntimeError):  # noqa: N818
    """The role stays what it is; the message says why."""


class StaleEpoch(RoleRefused):
    """The order is not newer than the role's own epoch, or comes too late."""


class EpochLeap(RoleRefused):
    """The order's epoch is so far beyond the role's own that no order could follow it for long."""


class OtherBoot(RoleRefused):
    """The order was meant for an earlier life of the engine."""


class Flow(Enum):
    """Which way the KV of an engine goes."""

    OUT = "out"
    IN = "in"

    @property
    def other(self) -> "Flow":
        """The other way."""
        return Flow.IN if self is Flow.OUT else Flow.OUT


def flow_of(role: "agent_pb2.Role.ValueType") -> Flow:
    """Which way it goes for requests that are split over an instance of this role and another.

    Mixed instances serve whole requests, and decode those whose prompt a prefill instance computed.
    """
    return Flow.OUT if role == agent_pb2.ROLE_PREFILL else Flow.IN


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine that answers says about itself."""

    engine: str
    """`vllm 0.32.0`, `emulated`."""
    max_model_len: int
    kv_block_size: int
    adapters: tuple[str, ...] = ()
    """LoRA adapters, by the names that clients ask for."""


class Instance:
    """State of one worker, as its agent sees it."""

    def __init__(self, config: AgentConfig) -> None:
        self._registration = agent_pb2.Registration(
            instance=config.name,
            deployment=config.deployment,
            model=config.served_model_name,
            revision=config.revision,
            cell=config.cell,
            role=config.role,
            home=config.role,
            # 0 is what a message without an epoch carries; it must never pass for a valid one.
            epoch=1,
            state=agent_pb2.STATE_STARTING,
            engine=config.engine,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            max_model_len=config.max_model_len,
            max_adapters=max_adapters(config),
            ahead_from_tokens=int(config.is_followed and config.transfer != "auto"),
            reason="engine starts",
        )
        self._scheduling = config.scheduling
        self._page: LoadPage | None = None
        self._terms: TermsPage | None = None
        self._proven: dict[Flow, agent_pb2.KvPath] = {}
        """By this life of the engine."""
        self._changed = asyncio.Event()
        self.ended = False
        """Whether followers should leave."""
        self.version = 0
        """Grows with every change of the registration."""

    @property
    def state(self) -> "agent_pb2.State.ValueType":
        """Where the instance is in its life."""
        return self._registration.state

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests any more."""
        return self.state == agent_pb2.STATE_DRAINING

    @property
    def load(self) -> Load:
        """The engine's newest numbers; zeros while there is none."""
        return self._page.read() if self._page else Load()

    def registration(self) -> agent_pb2.Registration:
        """A copy of what the instance states now."""
        copy = agent_pb2.Registration()
        copy.CopyFrom(self._registration)
        return copy

    def report(self) -> agent_pb2.LoadReport:
        """The load report of this moment."""
        load = self.load
        return agent_pb2.LoadReport(
            boot_id=self._registration.boot_id,
            epoch=self._registration.epoch,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            pending_prompt_tokens=load.pending_prompt_tokens,
            kv_blocks_free=load.kv_blocks_free,
            kv_cache_usage=load.kv_cache_usage,
            num_preemptions=load.num_preemptions,
            sampled_ns=load.sampled_ns,
        )

    async def change(self, seconds: float | None = None) -> None:
        """Wait for the next change, at most `seconds`."""
        event = self._changed
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def boot(
        self,
        boot_id: str,
        engine_url: str,
        page: LoadPage,
        terms: TermsPage | None = None,
        kv_port: int = 0,
    ) -> None:
        """A new engine was started: it writes its load into a page and follows another."""
        self._page, self._terms = page, terms
        self._tell_engine()
        state = self._registration
        state.boot_id = boot_id
        state.engine_url = engine_url
        state.kv_port = kv_port
        state.ClearField("kv_path")
        self._proven.clear()
        failure = state.last_failure
        reason = f"engine starts again: {failure}" if failure else "engine starts"
        self._enter(agent_pb2.STATE_STARTING, reason)

    def answered(self, facts: EngineFacts) -> None:
        """The engine answers; what remains is the test of its KV path."""
        state = self._registration
        state.engine = facts.engine
        state.max_model_len = facts.max_model_len
        state.kv_block_size = facts.kv_block_size
        state.kv_blocks_total = self.load.kv_blocks_total
        state.adapters[:] = facts.adapters
        self._enter(agent_pb2.STATE_VERIFYING, "KV path is being tested")

    def is_proven(self, flow: Flow) -> bool:
        """Whether a KV test passed that way, in this life of the engine."""
        return flow in self._proven

    def verified(self, kv_path: agent_pb2.KvPath, flow: Flow | None = None) -> None:
        """The KV test passed, that way or the way of the role: ready once it is the role's."""
        self._proven[flow or flow_of(self._registration.role)] = kv_path
        if shown := self._proven.get(flow_of(self._registration.role)):
            self._show(shown)

    def unverified(self, detail: str) -> None:
        """A test cannot show anything: ready, but for whole requests only."""
        kv_path = agent_pb2.KvPath(verified=False, detail=detail)
        if self.state == agent_pb2.STATE_READY and self._registration.kv_path == kv_path:
            return
        self._show(kv_path)

    def verification_failed(self, reason: str) -> None:
        """The KV test failed. An instance that serves whole requests already goes on doing so."""
        kv_path = agent_pb2.KvPath(verified=False, detail=reason)
        self._registration.kv_path.CopyFrom(kv_path)
        if self.state == agent_pb2.STATE_READY:
            self._enter(agent_pb2.STATE_READY, "")
        else:
            self._enter(agent_pb2.STATE_VERIFYING, reason)

    def lost(self, reason: str) -> None:
        """The engine is gone and will be started again, unless the instance drains."""
        if self.draining:
            return
        self._registration.restarts += 1
        self._registration.last_failure = reason
        self._enter(agent_pb2.STATE_STARTING, reason)

    def drain(self) -> None:
        """No new requests from now on; there is no way back."""
        self._enter(agent_pb2.STATE_DRAINING, "drains")

    def check_order(self, epoch: int, boot_id: str = "") -> None:
        """Whether an order to change the role may be followed. Raises RoleRefused, of its kinds."""
        state = self._registration
        if boot_id and boot_id != state.boot_id:
            raise OtherBoot(f"the engine's boot is {state.boot_id or 'yet to come'}, not {boot_id}")
        if epoch <= state.epoch:
            raise StaleEpoch(f"epoch {epoch} is not newer than {state.epoch}")
        if epoch - state.epoch > epochs.MAX_STEP:
            raise EpochLeap(
                f"epoch {epoch} is more than {epochs.MAX_STEP} beyond {state.epoch}:"
                f" state {state.epoch + 1}"
            )
        if self.draining:
            raise StaleEpoch("the instance drains")

    def set_role(
        self,
        role: "agent_pb2.Role.ValueType",
        epoch: int,
        boot_id: str = "",
        *,
        lasting: bool = False,
    ) -> None:
        """Take another role; `lasting`: as the instance's own. Raises RoleRefused, of its kinds."""
        self.check_order(epoch, boot_id)
        state = self._registration
        state.role = role
        if lasting:
            state.home = role
        state.epoch = epoch
        if kv_path := self._proven.get(flow_of(role)):
            state.kv_path.CopyFrom(kv_path)
        elif state.kv_path.verified:
            state.kv_path.CopyFrom(agent_pb2.KvPath(detail=f"not tested {flow_of(role).value}"))
        self._tell_engine()
        self._notify()

    def forget_page(self) -> None:
        """The engine of these pages is gone: its last numbers mean nothing now."""
        self._page = self._terms = None

    def end(self) -> None:
        """The agent ends: let followers leave."""
        self.ended = True
        self._notify()

    def _show(self, kv_path: agent_pb2.KvPath) -> None:
        self._registration.kv_path.CopyFrom(kv_path)
        self._enter(agent_pb2.STATE_READY, "")

    def _tell_engine(self) -> None:
        if self._terms:
            self._terms.write(self._scheduling.get(self._registration.role, terms.DEFAULT))

    def _enter(self, state: "agent_pb2.State.ValueType", reason: str) -> None:
        if not self.draining:
            self._registration.state = state
            self._registration.reason = reason
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
