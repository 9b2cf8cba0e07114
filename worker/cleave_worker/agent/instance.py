"""The state of a worker and its engine, which the agent reports to its watchers.

The supervisor, the KV test and the drain write it; the gRPC service and the health probe read it.
Watchers must receive every change at once without polling, so each change replaces an event that
they wait on.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from cleave.perf.model.model_report import read_host_memory
from cleave.policy import adapters
from cleave.policy.adapters import AdapterSource
from cleave.policy.pair_trust import ResultOrder
from cleave.rpc import role_epochs
from cleave.rpc.revision import build_revision
from cleave.rpc.v1 import agent_pb2
from cleave.shm.load_page import LoadPage, LoadSnapshot
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.launch import read_max_adapters
from cleave_worker.agent.weights.loaded_weights import NO_WEIGHTS, Weights
from cleave_worker.scheduling import config as scheduling_config
from cleave_worker.scheduling.config import Role
from cleave_worker.scheduling.config_page import SchedulingPage

STARTING = "engine starts"
"""The reason of an instance whose engine starts."""
_MAX_PAIRS = 1_024
"""Pairs whose newest results are kept; beyond that the oldest are dropped."""


class RoleChangeRefused(RuntimeError):  # noqa: N818
    """The role does not change; the message gives the reason."""


class StaleEpoch(RoleChangeRefused):
    """The command's epoch is not newer than the role's, or the instance drains."""


class EpochLeap(RoleChangeRefused):
    """The command's epoch is so far ahead that it would block valid commands for a long time."""


class BootMismatch(RoleChangeRefused):
    """The command was meant for an earlier boot of the engine."""


class AdaptersRefused(ValueError):  # noqa: N818
    """An order of adapters cannot be followed; the message gives the reason."""


class StaleAdapters(AdaptersRefused):
    """The order is older than the one that is followed."""


class KvDirection(Enum):
    """Direction in which an engine transfers KV."""

    OUT = "out"
    IN = "in"

    @property
    def opposite(self) -> "KvDirection":
        """The opposite direction."""
        return KvDirection.IN if self is KvDirection.OUT else KvDirection.OUT


def get_kv_direction(role: Role) -> KvDirection:
    """Return the direction for disaggregated requests on an instance of this role. Mixed instances
    serve colocated requests, and decode those that others have prefilled."""
    return KvDirection.OUT if role == agent_pb2.ROLE_PREFILL else KvDirection.IN


@dataclass(frozen=True, slots=True)
class ServedEngineInfo:
    """What an engine reports about itself."""

    engine: str
    """`vllm 0.32.0` or `emulated`."""
    max_model_len: int
    kv_block_size: int
    adapters: tuple[str, ...] = ()
    """LoRA adapters, by the names that clients use."""
    model_report: str = ""
    """What it reports about its model, see `cleave.perf.model.model_report`; empty: nothing."""
    always_thinks: bool = False
    """Whether its chat template ignores that a chat is to be answered without thinking."""


@dataclass(frozen=True, slots=True)
class EnginePages:
    """Files in memory that the agent shares with one boot of its engine."""

    load: LoadPage
    """The engine writes it, the agent the other one."""
    scheduling: SchedulingPage | None = None


class WorkerInstance:
    """State of one worker and its engine."""

    def __init__(self, config: AgentConfig) -> None:
        self._registration = agent_pb2.Registration(
            instance=config.name,
            deployment=config.deployment,
            model=config.served_model_name,
            revision=config.revision,
            cell=config.cell,
            role=config.role,
            home=config.role,
            # 0 is the epoch of a message without one, so it must never be valid.
            epoch=1,
            state=agent_pb2.STATE_STARTING,
            engine=config.engine,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            data_parallel_size=config.data_parallel_size,
            max_model_len=config.max_model_len,
            max_adapters=read_max_adapters(config),
            ahead_from_tokens=int(config.is_overlapped and config.transfer != "auto"),
            reason=STARTING,
        )
        self._spec_revision = config.revision
        self._scheduling = config.scheduling
        self._pages: EnginePages | None = None
        self._verified_paths: dict[KvDirection, agent_pb2.KvPath] = {}
        """Directions that passed a KV test in this boot of the engine."""
        self._changed = asyncio.Event()
        self.ended = False
        """Whether watchers should disconnect."""
        self.version = 0
        """Grows with every change of the registration."""
        self.ordered_adapters: tuple[AdapterSource, ...] = ()
        """LoRA adapters that the engine is to load at run time."""
        self.adapter_contents: Mapping[str, str] = {}
        """Digests of what was found at their sources."""
        self._adapter_generations: dict[str, int] = {}
        """Newest generation that ordered an adapter, by its engine name."""
        self._adapters_generation = 0
        self._pairs: dict[str, tuple[agent_pb2.PairProof, float]] = {}
        """Newest result of each pair and its time, by the boot of the prefill engine."""
        self.pairs_version = 0
        """Grows with every recorded result."""
        if config.adapters:
            self.order_adapters(config.adapters, 0)

    @property
    def versions(self) -> tuple[int, int]:
        """`version` and `pairs_version`."""
        return self.version, self.pairs_version

    @property
    def state(self) -> "agent_pb2.State.ValueType":
        """Life-cycle state of the instance."""
        return self._registration.state

    @property
    def draining(self) -> bool:
        """Whether it accepts no new requests any more."""
        return self.state == agent_pb2.STATE_DRAINING

    @property
    def load(self) -> LoadSnapshot:
        """The engine's newest load; zeros without an engine."""
        return self._pages.load.read() if self._pages else LoadSnapshot()

    def copy_registration(self) -> agent_pb2.Registration:
        """Return a copy of the present registration."""
        copy = agent_pb2.Registration()
        copy.CopyFrom(self._registration)
        return copy

    def build_load_report(self) -> agent_pb2.LoadReport:
        """Return the present load report."""
        load = self.load
        # Engines store a time, so the age is that of this report, however old their sample is.
        oldest_kv_ns = time.monotonic_ns() - load.oldest_kv_ns if load.oldest_kv_ns else 0
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
            prefix_cache_queries=load.prefix_cache_queries,
            prefix_cache_hits=load.prefix_cache_hits,
            host_kv_hits=load.host_kv_hits,
            host_kv_load_ms=load.host_kv_load_ms,
            oldest_kv_ms=math.ceil(oldest_kv_ns / 1_000_000),
        )

    async def wait_for_change(self, seconds: float | None = None) -> None:
        """Wait for the next change, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def start_boot(
        self,
        boot_id: str,
        engine_url: str,
        pages: EnginePages,
        kv_port: int = 0,
        engine_key: str = "",
        weights: Weights = NO_WEIGHTS,
    ) -> None:
        """Record a new engine, with its pages, the key that it asks for, and what it loads.
        `kv_port`: where its KV can be followed; 0: nowhere."""
        self._pages = pages
        self._write_scheduling()
        state = self._registration
        state.boot_id = boot_id
        state.engine_url = engine_url
        state.kv_port = kv_port
        state.engine_key = engine_key
        state.revision = build_revision(self._spec_revision, weights.id)
        state.weights, state.weights_fault = weights.id, weights.fault
        state.weights_read_ms = int(weights.read_s * 1000)
        state.prefix_port = 0
        state.ClearField("kv_path")
        state.ClearField("model_report")
        self._verified_paths.clear()
        self._pairs.clear()
        self._enter_state(agent_pb2.STATE_STARTING, self._describe_start(""))

    def report_start_stage(self, stage: str) -> None:
        """Report what the engine does while it starts; empty: not known."""
        reason = self._describe_start(stage)
        if self.state == agent_pb2.STATE_STARTING and self._registration.reason != reason:
            self._enter_state(agent_pb2.STATE_STARTING, reason)

    def _describe_start(self, stage: str) -> str:
        """The failure of the last engine is more important than what this one does."""
        if failure := self._registration.last_failure:
            return f"engine starts again{f' ({stage})' if stage else ''}: {failure}"
        return f"{STARTING}: {stage}" if stage else STARTING

    def set_prefix_port(self, port: int) -> None:
        """Record where the engine's prefix cache can be pulled from, before it is verified."""
        self._registration.prefix_port = port

    def set_engine_info(self, info: ServedEngineInfo) -> None:
        """Record that the engine responds; the KV test comes next."""
        state = self._registration
        state.engine = info.engine
        state.max_model_len = info.max_model_len
        state.kv_block_size = info.kv_block_size
        state.kv_blocks_total = self.load.kv_blocks_total
        state.adapters[:] = info.adapters
        state.model_report = info.model_report
        state.always_thinks = info.always_thinks
        memory = read_host_memory(info.model_report)
        state.host_kv_tokens, state.host_kv_token_ms = memory.tokens, memory.token_ms
        self._enter_state(agent_pb2.STATE_VERIFYING, "KV path is being tested")

    def is_verified(self, flow: KvDirection) -> bool:
        """Return whether a KV test in this direction passed in this boot of the engine."""
        return flow in self._verified_paths

    def mark_verified(self, kv_path: agent_pb2.KvPath, flow: KvDirection | None = None) -> None:
        """Record a passed KV test; the instance becomes ready if the test was for its role."""
        self._verified_paths[flow or get_kv_direction(self._registration.role)] = kv_path
        if shown := self._verified_paths.get(get_kv_direction(self._registration.role)):
            self._mark_ready(shown)

    def mark_unverified(self, detail: str) -> None:
        """Become ready for colocated requests only, as no test can show more."""
        kv_path = agent_pb2.KvPath(verified=False, detail=detail)
        if self.state == agent_pb2.STATE_READY and self._registration.kv_path == kv_path:
            return
        self._mark_ready(kv_path)

    def mark_verification_failed(self, reason: str) -> None:
        """Record a failed KV test. An instance that serves colocated requests stays ready."""
        self._registration.kv_path.CopyFrom(agent_pb2.KvPath(verified=False, detail=reason))
        if self.state == agent_pb2.STATE_READY:
            self._enter_state(agent_pb2.STATE_READY, "")
        else:
            self._enter_state(agent_pb2.STATE_VERIFYING, reason)

    def mark_engine_lost(self, reason: str) -> None:
        """Record that the engine ended and will be restarted, unless the instance drains."""
        if self.draining:
            return
        self._registration.restarts += 1
        self._registration.last_failure = reason
        self._enter_state(agent_pb2.STATE_STARTING, reason)

    def drain(self) -> None:
        """Accept no new requests from now on; this is final."""
        self._enter_state(agent_pb2.STATE_DRAINING, "drains")

    def check_role_change(self, epoch: int, boot_id: str = "") -> None:
        """Check that a role may be changed by a command. Raises a subclass of RoleChangeRefused."""
        registration = self._registration
        if boot_id and boot_id != registration.boot_id:
            current = registration.boot_id or "yet to come"
            raise BootMismatch(f"the engine's boot is {current}, not {boot_id}")
        if epoch <= registration.epoch:
            raise StaleEpoch(f"epoch {epoch} is not newer than {registration.epoch}")
        if epoch - registration.epoch > role_epochs.MAX_EPOCH_STEP:
            raise EpochLeap(
                f"epoch {epoch} is more than {role_epochs.MAX_EPOCH_STEP} beyond"
                f" {registration.epoch}: state {registration.epoch + 1}"
            )
        if self.draining:
            raise StaleEpoch("the instance drains")

    def set_role(self, role: Role, epoch: int, boot_id: str = "", *, lasting: bool = False) -> None:
        """Change the role; `lasting`: also the configured one. Raises RoleChangeRefused."""
        self.check_role_change(epoch, boot_id)
        registration = self._registration
        registration.role = role
        if lasting:
            registration.home = role
        registration.epoch = epoch
        if kv_path := self._verified_paths.get(get_kv_direction(role)):
            registration.kv_path.CopyFrom(kv_path)
        elif registration.kv_path.verified:
            untested = f"not tested {get_kv_direction(role).value}"
            registration.kv_path.CopyFrom(agent_pb2.KvPath(detail=untested))
        self._write_scheduling()
        self._notify()

    def order_adapters(self, ordered: Sequence[AdapterSource], generation: int) -> None:
        """Take an order of adapters, of this generation of the deployment, for `agent.adapters`.
        Raises AdaptersRefused."""
        if fault := adapters.find_fault(ordered):
            raise AdaptersRefused(fault)
        newest = self._adapters_generation
        if generation < newest:
            raise StaleAdapters(f"generation {generation} is older than {newest}")
        self.ordered_adapters, self._adapters_generation = tuple(ordered), generation
        self._registration.adapters_digest = adapters.hash_adapters(ordered)
        self._notify()

    def report_adapters(self, reported: Sequence[agent_pb2.RuntimeAdapter]) -> None:
        """Report what became of the order; watchers receive it unless nothing has changed."""
        ordered = adapters.add_contents(self.ordered_adapters, self.adapter_contents)
        newest = {each.engine_name: self._adapters_generation for each in ordered}
        generations = self._adapter_generations | newest
        names = [each.engine_name for each in reported]
        self._adapter_generations = {name: generations.get(name, 0) for name in names}
        for each in reported:
            each.generation = self._adapter_generations[each.engine_name]
        if list(self._registration.runtime_adapters) != list(reported):
            del self._registration.runtime_adapters[:]
            self._registration.runtime_adapters.extend(reported)
            self._notify()

    def record_pairs(self, boot_id: str, proofs: Iterable[agent_pb2.PairProof]) -> None:
        """Keep what a gateway has found out about pairs with this decode engine, until it restarts;
        an older result replaces no newer one. Raises BootMismatch."""
        if boot_id != self._registration.boot_id:
            raise BootMismatch(f"the engine's boot is {self._registration.boot_id}, not {boot_id}")
        now = time.monotonic()
        for proof in proofs:
            boot_id, at = proof.prefill_boot_id, now - proof.age_ms / 1000
            known = self._pairs.get(boot_id)
            if known is not None and _read_order(proof, at).is_before(_read_order(*known)):
                continue
            # Deleted first, so that the order is that of the results.
            self._pairs.pop(boot_id, None)
            self._pairs[boot_id] = proof, at
        while len(self._pairs) > _MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        self.pairs_version += 1
        self._wake_watchers()

    def build_pair_proofs(self) -> agent_pb2.PairProofs:
        """Return the newest result of each pair, with its present age."""
        now = time.monotonic()
        proofs = agent_pb2.PairProofs(boot_id=self._registration.boot_id)
        for proof, at in self._pairs.values():
            proofs.proofs.add().CopyFrom(proof)
            proofs.proofs[-1].age_ms = max(int((now - at) * 1000), 0)
        return proofs

    def detach_pages(self) -> None:
        """Stop reading the load of an engine that has ended."""
        self._pages = None

    def end(self) -> None:
        """End the agent: let watchers disconnect."""
        self.ended = True
        self._notify()

    def _mark_ready(self, kv_path: agent_pb2.KvPath) -> None:
        self._registration.kv_path.CopyFrom(kv_path)
        self._enter_state(agent_pb2.STATE_READY, "")

    def _write_scheduling(self) -> None:
        if self._pages and self._pages.scheduling:
            role = self._registration.role
            self._pages.scheduling.write(self._scheduling.get(role, scheduling_config.DEFAULT))

    def _enter_state(self, state: "agent_pb2.State.ValueType", reason: str) -> None:
        if not self.draining:
            self._registration.state = state
            self._registration.reason = reason
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _read_order(proof: agent_pb2.PairProof, at: float) -> ResultOrder:
    return ResultOrder(proof.source, proof.sequence, at)
