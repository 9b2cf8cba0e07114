"""All servers of a worker and of its deployment's gateway, on loopback, as they check callers.

The API server alone is a double: its tokens are those of `tests.support.account_tokens`.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from cleave.gateway.config import GatewayConfig
from cleave.gateway.server import GatewayServer
from cleave.manifests.credentials import Accounts, add_credentials, name_accounts
from cleave.manifests.labels import WORKER
from cleave.perf import named_profiles
from cleave.perf.model import model_shape
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV, AgentEndpoint
from cleave.rpc.engine_key import compute_kv_key
from cleave.rpc.v1 import agent_pb2, gang_pb2_grpc
from cleave_worker.access.engine_access import EngineAccess
from cleave_worker.agent.account_signatures import AccountSignatures
from cleave_worker.agent.authentication import AuthenticationInterceptor
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.service import AgentServer
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.config import EmulatedEngineConfig
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits
from cleave_worker.transfer.authentication import authenticate_consumer
from cleave_worker.transfer.listener import Listener
from cleave_worker.transfer.protocol import FramedConnection, ProtocolError

from tests.support.account_tokens import TokenIssuer
from tests.support.certificates import Files
from tests.support.ports import find_free_port

HOST = "127.0.0.1"
OPERATOR = "system:serviceaccount:cleave-system:cleave-operator"


@dataclass
class Target:
    """Ports, accounts and keys."""

    namespace: str
    deployment: str
    worker: str
    agent: int = field(default_factory=find_free_port)
    launcher: int = field(default_factory=find_free_port)
    internal: int = field(default_factory=find_free_port)
    router: int = field(default_factory=find_free_port)
    router_files: Files | None = None
    """Its certificate, which is its callers' authority, too."""
    picker: int = field(default_factory=find_free_port)
    engine: int = 0
    kv: int = 0
    gateway: int = 0

    @property
    def accounts(self) -> Accounts:
        uid = f"uid of {self.namespace}/{self.deployment}"
        return name_accounts(self.namespace, self.deployment, uid)

    @property
    def gateways(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.accounts.gateways}"

    @property
    def workers(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.accounts.workers}"

    @property
    def api_key(self) -> str:
        """Of a client."""
        return f"client-of-{self.namespace}-{self.deployment}"

    @property
    def engine_key(self) -> str:
        return f"engine-of-{self.namespace}-{self.worker}"

    @property
    def endpoint(self) -> AgentEndpoint:
        uid = f"uid-of-{self.namespace}-{self.worker}"
        return AgentEndpoint(f"{HOST}:{self.agent}", self.worker, uid)


@contextlib.asynccontextmanager
async def serving(target: Target, issuer: TokenIssuer, folder: Path) -> AsyncIterator[Target]:
    """Serve on all ports. `folder`: for the keys of clients."""
    async with contextlib.AsyncExitStack() as stack:
        _serve_kv(stack, target)
        await _serve_agent(stack, target, issuer)
        await _serve_engine(stack, target)
        await _serve_gateway(stack, target, folder)
        yield target


def _serve_kv(stack: contextlib.ExitStack | contextlib.AsyncExitStack, target: Target) -> None:
    key = compute_kv_key(target.engine_key)

    def serve(connection: FramedConnection) -> None:
        with contextlib.suppress(ProtocolError, TimeoutError, OSError):
            authenticate_consumer(connection, key)

    listener = Listener(HOST, 0, serve)
    listener.start()
    stack.callback(listener.close)
    target.kv = listener.port


async def _serve_agent(
    stack: contextlib.AsyncExitStack, target: Target, issuer: TokenIssuer
) -> None:
    """The agent and the launcher of data-parallel ranks, whose callers the operator names."""
    containers = {"containers": [{"name": "worker"}]}
    spec = add_credentials(containers, WORKER, target.accounts, OPERATOR)
    env = {each["name"]: each["value"].split(",") for each in spec["containers"][0]["env"]}
    uid = target.endpoint.pod_uid
    callers = AccountSignatures(
        env[CALLERS_ENV], env[PEERS_ENV], target.worker, uid, issuer.fetch_keys
    )
    config = AgentConfig(
        name=target.worker, deployment=target.deployment, revision="r",
        role=agent_pb2.ROLE_DECODE, model="opt-13b", served_model_name="m", engine="emulated",
        host=HOST, port=target.agent,
    )  # fmt: skip
    instance = WorkerInstance(config)
    instance._registration.engine_key = target.engine_key

    async def act(*_: object) -> Any:
        raise NotImplementedError

    agent = AgentServer(instance, act, act, config.address, callers)
    await agent.start()
    stack.push_async_callback(agent.stop, 0)
    stack.callback(instance.end)
    launcher = grpc.aio.server(interceptors=[AuthenticationInterceptor(callers)])
    gang_pb2_grpc.add_GangServicer_to_server(gang_pb2_grpc.GangServicer(), launcher)
    launcher.add_insecure_port(f"{HOST}:{target.launcher}")
    await launcher.start()
    stack.push_async_callback(launcher.stop, 0)


async def _serve_engine(stack: contextlib.AsyncExitStack, target: Target) -> None:
    engine = EmulatedEngine(
        EmulatedEngineConfig(
            served_model_name="m",
            shape=model_shape.load_shape("opt-13b"),
            profile=named_profiles.load_profile("distserve/opt-13b/tp1"),
            max_model_len=2_048,
            limits=EngineLimits(max_num_seqs=8, max_num_batched_tokens=512),
            block_size=16,
            num_blocks=200,
            time_scale=0.01,
        )
    )
    await engine.start()
    stack.push_async_callback(engine.stop)
    api = EmulatorApi(engine, access=EngineAccess(target.engine_key))
    runner = web.AppRunner(api.build_application())
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, HOST, 0).start()
    target.engine = runner.addresses[0][1]


async def _serve_gateway(stack: contextlib.AsyncExitStack, target: Target, folder: Path) -> None:
    (certificates := folder / f"{target.namespace}-{target.worker}").mkdir()
    target.router_files = Files(certificates).write()
    keys = folder / f"keys-{target.namespace}-{target.worker}"
    keys.write_text(f"{target.api_key}\n")
    config = GatewayConfig(
        "", port=0, api_keys=keys, internal_port=target.internal, router_port=target.router,
        router_certificate=target.router_files.certificate, router_key=target.router_files.key,
        router_client_ca=target.router_files.certificate,
        endpoint_picker_port=target.picker, endpoint_picker_plain=True, witness_share=0.0,
    )  # fmt: skip
    gateway = GatewayServer(config)
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    target.gateway = gateway.port
    registration = agent_pb2.Registration(
        instance=target.worker, deployment=target.deployment, model="m", revision="r",
        boot_id="b", role=agent_pb2.ROLE_MIXED, state=agent_pb2.STATE_READY,
        engine_url=f"http://{HOST}:{target.engine}", engine_key=target.engine_key,
        kv_path=agent_pb2.KvPath(verified=True),
    )  # fmt: skip
    event = agent_pb2.WatchEvent(registration=registration)
    gateway.context.router.registry.on_event(target.endpoint.address, event, 1e12)
