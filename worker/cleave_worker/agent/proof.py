"""From "the engine answers" to "ready": finds a peer, runs the KV test, says what came of it.

Run by the supervisor beside the health checks, once for every boot. The cases:
- a peer is there and the test passes: ready, KV path verified;
- a peer is there and the test fails: not ready, tried again with growing delay. A worker that is
  ready without proof already stays so: it serves whole requests, and the fault may be the peer's;
- a peer is there and its engine does not count what it pulls, or other hand-offs hide how the test
  went: nothing can be shown, so ready without proof, and tried again;
- a peer is in sight but its engine still starts: wait, as long as an engine may take to start;
- no peer is in sight: after a while ready without proof, and the search goes on.

Once the way of the role is proven the other way is tried, too, for the role may change. What that
left unproven is tested before a change of role that needs it is told to anybody.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from cleave.rpc.discovery import DiscoveryError
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent import peers
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import Flow, Instance, flow_of
from cleave_worker.agent.launch import has_gpu
from cleave_worker.agent.verify import (
    Endpoint,
    InconclusiveError,
    TransferError,
    UncountedError,
    verify_transfer,
)

_log = logging.getLogger(__name__)
_NO_PEER = "no peer yet"
_FIRST_DELAY = 1.0

Look = Callable[[], Awaitable[peers.Sight]]
Test = Callable[[agent_pb2.Registration, Flow], Awaitable[agent_pb2.KvPath]]


async def prove(config: AgentConfig, instance: Instance) -> None:
    """Bring an instance whose engine answers to ready; returns once nothing is left to prove."""
    if not config.peers:
        instance.unverified(_NO_PEER)
        return
    look = _looker(config, instance, peers.suits)
    await pursue(config, instance, look, _tester(config, instance))


async def pursue(config: AgentConfig, instance: Instance, look: Look, test: Test) -> None:
    """Look for peers and test with them until a test passes."""
    clock = asyncio.get_running_loop().time
    timing = config.timing
    begun = seen = clock()
    delay = _FIRST_DELAY
    while True:
        sight = await look()
        if sight.peer:
            seen = clock()
            if await _attempt(instance, sight.peer, test):
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, timing.verify_delay_max)
            continue
        if sight.starting and clock() - begun < timing.start_timeout:
            seen = clock()
        elif clock() - seen >= timing.peer_wait:
            instance.unverified(_NO_PEER)
        ready = instance.state == agent_pb2.STATE_READY
        await asyncio.sleep(timing.peer_search if ready else timing.peer_poll)


async def prove_role(
    config: AgentConfig, instance: Instance, role: "agent_pb2.Role.ValueType"
) -> None:
    """Before a ready instance takes a role: test the way of its KV. Raises TransferError.

    Any engine of the kind will do, whatever its role; when there is none, nothing is tested. Where
    engines do not count bytes the role is taken, too, unverified: no later test would show more.
    """
    flow = flow_of(role)
    ready = instance.state == agent_pb2.STATE_READY
    if instance.is_proven(flow) or not ready or not config.peers:
        return
    look = _looker(config, instance, peers.is_akin)
    boot_id = instance.registration().boot_id
    if peer := (await look()).peer:
        try:
            kv_path = await _tester(config, instance)(peer, flow)
        except UncountedError:
            return
        if instance.registration().boot_id == boot_id:
            instance.verified(kv_path, flow)


async def _attempt(instance: Instance, peer: agent_pb2.Registration, test: Test) -> bool:
    flow = flow_of(instance.registration().role)
    try:
        kv_path = await test(peer, flow)
    except InconclusiveError as error:
        instance.unverified(str(error))
        return False
    except TransferError as error:
        reason = f"KV test with {peer.instance} failed: {error}"
        _log.warning(reason)
        instance.verification_failed(reason)
        return False
    await _try_other_way(instance, peer, test, flow.other)
    instance.verified(kv_path, flow)
    # The role may have changed meanwhile.
    return instance.is_proven(flow_of(instance.registration().role))


async def _try_other_way(
    instance: Instance, peer: agent_pb2.Registration, test: Test, flow: Flow
) -> None:
    try:
        instance.verified(await test(peer, flow), flow)
    except TransferError as error:
        _log.warning("KV test with %s failed the other way: %s", peer.instance, error)


def _looker(config: AgentConfig, instance: Instance, matches: peers.Matches) -> Look:
    addresses = peers.Addresses(config.peers, config.address)

    async def look() -> peers.Sight:
        try:
            known = await addresses.find()
        except (DiscoveryError, OSError) as error:
            _log.error("cannot look for peers: %s", error)
            return peers.Sight()
        return await peers.look(known, instance.registration(), matches)

    return look


def _tester(config: AgentConfig, instance: Instance) -> Test:
    # System randomness: two workers that start together must not invent the same prompts.
    words = random.SystemRandom()
    transport = _name_transport(config)

    async def test(peer: agent_pb2.Registration, flow: Flow) -> agent_pb2.KvPath:
        own = instance.registration()
        prefill, decode = (own, peer) if flow is Flow.OUT else (peer, own)
        transfer = await verify_transfer(
            _endpoint(prefill),
            _endpoint(decode),
            config.served_model_name,
            seconds=config.timing.verify_timeout,
            random_words=words,
        )
        kv_path = agent_pb2.KvPath(
            verified=True,
            transport=f"{transport} over {transfer.after.way}" if transfer.after.way else transport,
            transfer_ms=transfer.first_token_ms,
            bytes_per_s=transfer.bytes_per_s,
            detail=f"{prefill.instance} -> {decode.instance}: {transfer.describe()}",
        )
        _log.info("KV path verified: %s, %s", kv_path.transport, kv_path.detail)
        return kv_path

    return test


def _name_transport(config: AgentConfig) -> str:
    """What moves the KV, as far as this container's devices tell; its speed is measured.

    Without RDMA a GPU's KV may go over NVLink or TCP, which only the speed tells apart; without a
    GPU what is left is TCP, or shared memory between engines of one machine.
    """
    if config.engine != "vllm":
        return "emulated"
    if config.connector == "cleave":
        return "cleave"
    if any(Path("/dev/infiniband").glob("uverbs*")):
        return "nixl over rdma"
    return "nixl" if has_gpu() else "nixl over tcp"


def _endpoint(of: agent_pb2.Registration) -> Endpoint:
    return Endpoint(of.instance, of.engine_url, of.boot_id, of.max_model_len)
