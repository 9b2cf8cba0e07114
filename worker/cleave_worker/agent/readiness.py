"""Makes an instance ready once its engine responds: finds a peer and runs the KV test with it.

Run by the supervisor beside the health checks, once per boot. The cases:
- A peer exists and the test passes: ready, KV path verified.
- A peer exists and the test fails: not ready, retried with growing delay. A worker that is ready
  unverified stays ready: it serves colocated requests, and the fault may be the peer's.
- A peer exists, but its engine does not count pulled bytes, or other handoffs hide the result: the
  test is inconclusive, so ready unverified, and retried.
- A peer exists, but its engine still starts: wait, as long as an engine may take to start.
- No peer exists: after a while ready unverified, and the search goes on.
- A mixed instance without a peer, or whose peers still start, is ready unverified at once: what it
  serves needs no handoff.

After the direction of the role the opposite direction is tested, too, as the role may change. A
direction that failed or was skipped is tested again before a role that needs it is announced.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from cleave.rpc.agent_discovery import DiscoveryError
from cleave.rpc.credentials import find_credentials
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent import kv_self_test, memory_lock, peers
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import KvDirection, WorkerInstance, get_kv_direction
from cleave_worker.agent.kv_self_test import InconclusiveError, KvTestError, MissingCountersError
from cleave_worker.agent.launch import has_gpu
from cleave_worker.scheduling.config import Role

_log = logging.getLogger(__name__)
_NO_PEER = "no peer yet"
_FIRST_DELAY = 1.0

ScanPeers = Callable[[], Awaitable[peers.PeerScan]]
RunKvTest = Callable[[agent_pb2.Registration, KvDirection], Awaitable[agent_pb2.KvPath]]


async def verify_kv_path(config: AgentConfig, instance: WorkerInstance) -> None:
    """Make an instance ready whose engine responds; return once its KV path is verified."""
    if not config.peers:
        instance.mark_unverified(_NO_PEER)
        return
    look = _build_scan(config, instance, peers.is_counterpart)
    await verify_with_peers(config, instance, look, _build_test(config, instance))


async def verify_with_peers(
    config: AgentConfig, instance: WorkerInstance, search: ScanPeers, run_test: RunKvTest
) -> None:
    """Search for peers and test with them until a test passes."""
    clock = asyncio.get_running_loop().time
    timing = config.timing
    started_at = seen_at = clock()
    delay = _FIRST_DELAY
    while True:
        scan = await search()
        if scan.peer:
            seen_at = clock()
            if await _test_peer(instance, scan.peer, run_test):
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, timing.verify_delay_max)
            continue
        if instance.copy_registration().role == agent_pb2.ROLE_MIXED:
            instance.mark_unverified(_NO_PEER)
        elif scan.has_starting and clock() - started_at < timing.start_timeout:
            seen_at = clock()
        elif clock() - seen_at >= timing.peer_wait:
            instance.mark_unverified(_NO_PEER)
        ready = instance.state == agent_pb2.STATE_READY
        await asyncio.sleep(timing.peer_search if ready else timing.peer_poll)


async def verify_role(config: AgentConfig, instance: WorkerInstance, role: Role) -> None:
    """Test the KV direction of a role before a ready instance changes to it. Raises KvTestError.

    Any compatible engine serves as peer; without one nothing is tested. Where engines do not count
    bytes the role is set unverified, as no later test would show more.
    """
    flow = get_kv_direction(role)
    ready = instance.state == agent_pb2.STATE_READY
    if instance.is_verified(flow) or not ready or not config.peers:
        return
    look = _build_scan(config, instance, peers.is_compatible)
    boot_id = instance.copy_registration().boot_id
    if peer := (await look()).peer:
        try:
            kv_path = await _build_test(config, instance)(peer, flow)
        except MissingCountersError:
            return
        if instance.copy_registration().boot_id == boot_id:
            instance.mark_verified(kv_path, flow)


async def _test_peer(
    instance: WorkerInstance, peer: agent_pb2.Registration, run_test: RunKvTest
) -> bool:
    flow = get_kv_direction(instance.copy_registration().role)
    try:
        kv_path = await run_test(peer, flow)
    except InconclusiveError as error:
        instance.mark_unverified(str(error))
        return False
    except KvTestError as error:
        reason = f"KV test with {peer.instance} failed: {error}"
        _log.warning(reason)
        instance.mark_verification_failed(reason)
        return False
    try:
        instance.mark_verified(await run_test(peer, flow.opposite), flow.opposite)
    except KvTestError as error:
        _log.warning("KV test with %s failed in the opposite direction: %s", peer.instance, error)
    instance.mark_verified(kv_path, flow)
    # The role may have changed meanwhile.
    return instance.is_verified(get_kv_direction(instance.copy_registration().role))


def _build_scan(
    config: AgentConfig, instance: WorkerInstance, matches: peers.PeerFilter
) -> ScanPeers:
    endpoints = peers.PeerEndpoints(config.peers, config.address)
    credentials = find_credentials()

    async def scan() -> peers.PeerScan:
        try:
            known = await endpoints.get_endpoints()
        except (DiscoveryError, OSError) as error:
            _log.error("cannot search for peers: %s", error)
            return peers.PeerScan()
        return await peers.find_peer(known, instance.copy_registration(), credentials, matches)

    return scan


def _build_test(config: AgentConfig, instance: WorkerInstance) -> RunKvTest:
    # System randomness: two workers that start together must not generate the same prompts.
    rng = random.SystemRandom()
    transport = _name_transport(config)

    async def test(peer: agent_pb2.Registration, flow: KvDirection) -> agent_pb2.KvPath:
        own = instance.copy_registration()
        prefill, decode = (own, peer) if flow is KvDirection.OUT else (peer, own)
        transfer = await kv_self_test.verify_transfer(
            _build_endpoint(prefill),
            _build_endpoint(decode),
            config.served_model_name,
            seconds=config.timing.verify_timeout,
            random_words=rng,
        )
        carrier = transfer.after.transport
        pull_ms = transfer.seconds * 1e3 / _count_ranks(decode)
        details = (transfer.describe(), memory_lock.explain_limit())
        kv_path = agent_pb2.KvPath(
            verified=True,
            transport=f"{transport} over {carrier}" if carrier else transport,
            transfer_ms=transfer.first_token_ms,
            bytes_per_s=transfer.bytes_per_s,
            pull_ms=pull_ms,
            token_ms=pull_ms / max(transfer.num_tokens, 1),
            detail=f"{prefill.instance} -> {decode.instance}: {'; '.join(filter(None, details))}",
        )
        _log.info("KV path verified: %s, %s", kv_path.transport, kv_path.detail)
        return kv_path

    return test


def _count_ranks(instance: agent_pb2.Registration) -> int:
    return max(1, instance.tensor_parallel_size) * max(1, instance.pipeline_parallel_size)


def _name_transport(config: AgentConfig) -> str:
    """Name what transfers the KV, as far as the devices of this container show.

    Without RDMA a GPU's KV may go over NVLink or TCP, which only the measured bandwidth
    distinguishes; without a GPU it goes over TCP, or shared memory between engines of one machine.
    """
    if config.engine != "vllm":
        return "emulated"
    if config.connector == "cleave":
        return "cleave"
    if any(Path("/dev/infiniband").glob("uverbs*")):
        return "nixl over rdma"
    return "nixl" if has_gpu() else "nixl over tcp"


def _build_endpoint(of: agent_pb2.Registration) -> kv_self_test.Endpoint:
    return kv_self_test.Endpoint(
        of.instance, of.engine_url, of.boot_id, of.max_model_len, of.engine_key
    )
